"""A model that no rank holds is called like one that each holds: equal to the last bit, whoever has what to do."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from drover.model.config import ModelConfig
from drover.model.generation.stream import generate
from drover.pipeline.evaluation.placing import fewest, needed, place
from drover.pipeline.formats.weights import load_model, open_weights
from tests.parallel.groups import run_case
from tests.tiny_models import TOKENIZER_OF_BYTES, for_tokenizer, write_huggingface


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


def written(folder, **changes):
    """A folder in Hugging Face's form with weights that make sharp choices."""
    model = for_tokenizer(TOKENIZER_OF_BYTES, layers=3, **changes)
    return str(write_huggingface(folder / "hf", model, TOKENIZER_OF_BYTES))


@pytest.mark.parametrize(("ranks", "dp_shard", "dtype", "changes"), [
    (2, 2, "bfloat16", {"tied_embeddings": True}), (4, 2, "float32", {}),
    (4, 4, "float32", {"head_dim": 16})])
def test_shared_or_whole_the_model_computes_the_same(tmp_path, ranks, dp_shard, dtype, changes):
    """Logits of every shape, and texts with caches, from ranks that call it 0, 3 or 6 times."""
    assert sum(run_case(ranks, calls, folder=written(tmp_path, **changes), dp_shard=dp_shard, dtype=dtype)) > 5


def test_one_rank_fails_and_the_other_ends_its_work(tmp_path):
    assert run_case(2, one_fails, folder=written(tmp_path)) == [
        (4, None, False), (1, "a text that cannot be read", False)]


def test_as_few_ranks_as_the_memory_allows():
    config = ModelConfig(dim=256, layers=8, heads=4, kv_heads=2, ffn_dim=512, vocab_size=1024, context_length=64)
    size = 4 * config.parameter_count
    assert needed(config, torch.float32, 1) == size == 2 * needed(config, torch.bfloat16, 1)
    assert fewest(config, torch.float32, size, 8) == 1
    assert fewest(config, torch.float32, needed(config, torch.float32, 3), 6) == 3
    assert fewest(config, torch.float32, 1, 8) == 8, "nothing is enough: what takes least"
