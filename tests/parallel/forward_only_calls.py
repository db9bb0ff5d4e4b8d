"""Run by several ranks: a model that they share is called, by each rank another number of times."""

from __future__ import annotations

from pathlib import Path

import torch

from drover.model.generate import generate
from drover.pipeline.evaluation.placing import place
from drover.pipeline.formats.weights import load_model, open_weights


def calls(ranks, folder, dp_shard, dtype):
    """Asserts on each rank that its logits and texts are those of the whole model, to the last bit, and that it holds
    and reads its share of the weights; how many tokens each has written."""
    dtype = getattr(torch, dtype)
    reads = []
    with open_weights(Path(folder)) as weights:
        whole = load_model(weights, ranks.device, dtype)
        original = weights.read
        weights.read = lambda name, offset=None, shape=None: reads.append(
            original(name, offset, shape).numel()) or original(name, offset, shape)
        placed = place(weights, ranks.device, dtype, ranks=ranks, dp_shard=dp_shard)
    whole.backend = placed.model.backend
    draw = torch.Generator().manual_seed(ranks.rank)
    inputs = [torch.randint(0, 160, (1 + ranks.rank, 10 + 7 * number), generator=draw)
              for number in range(3 * (ranks.rank % 3))]  # rank 0 has no call at all
    for _ in range(2):
        with placed.together:
            result = [placed.model(tokens).clone() for tokens in inputs]
    with torch.inference_mode():
        assert all(torch.equal(ours, whole(tokens)) for ours, tokens in zip(result, inputs, strict=True))
    prompts = [[1 + ranks.rank, 2, 3]] * ranks.rank
    texts = []
    for model in (placed.model, whole):
        with placed.together:
            texts.append(generate(model, prompts, 5 + ranks.rank, temperature=0.8, top_p=0.9, seed=1, stop_ids={5}))
    assert texts[0] == texts[1]
    share = sum(parameter.numel() for parameter in whole.parameters()) / dp_shard
    assert sum(parameter.to_local().numel() for parameter in placed.model.parameters()) <= 1.05 * share
    assert sum(reads) <= 1.2 * share, "each rank reads its rows"
    return ranks.gather(sum(map(len, texts[0])))


def one_fails(ranks, folder):
    """One rank has an error of its own between two calls; the other makes all of its calls."""
    with open_weights(Path(folder)) as weights:
        placed = place(weights, ranks.device, torch.float32, ranks=ranks, dp_shard=2)
    made = 0
    failure = None
    try:
        with placed.together:
            for number in range(4):
                if ranks.rank == 1 and number == 1:
                    raise ValueError("a text that cannot be read")
                placed.model(torch.zeros(1, 4, dtype=torch.int64))
                made += 1
    except ValueError as error:
        failure = str(error)
    return ranks.gather((made, failure, placed.broken))
