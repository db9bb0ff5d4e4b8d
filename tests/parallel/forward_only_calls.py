"""Run by several ranks: a model that they share is called, by each rank another number of times."""

from __future__ import annotations

from pathlib import Path

import torch

from drover.model.config import ModelConfig
from drover.model.generate import generate
from drover.pipeline.evaluation.placing import place
from drover.pipeline.formats.weights import load_model, open_weights
from tests.formats.exporting import write_model
from tests.tiny_models import opinionated


def calls(ranks, folder, dp_shard, dtype):
    """What each rank found equal to the whole model's, and what it holds; or the error that one rank had."""
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
            found = [placed.model(tokens).clone() for tokens in inputs]
    with torch.inference_mode():
        equal = [torch.equal(ours, whole(tokens)) for ours, tokens in zip(found, inputs, strict=True)]
    prompts = [[1 + ranks.rank, 2, 3]] * ranks.rank
    texts = []
    for model in (placed.model, whole):
        with placed.together:
            texts.append(generate(model, prompts, 5 + ranks.rank, temperature=0.8, top_p=0.9, seed=1, stop_ids={5}))
    held = sum(parameter.to_local().numel() if dp_shard > 1 else parameter.numel()
               for parameter in placed.model.parameters())
    everyone = ranks.gather({"equal": equal, "texts": texts[0] == texts[1], "held": held, "read": sum(reads),
                             "written": sum(map(len, texts[0]))})
    return {"ranks": everyone, "parameters": sum(parameter.numel() for parameter in whole.parameters())}


def one_fails(ranks, folder):
    """One rank has an error of its own between two calls; the other makes all of its calls."""
    with open_weights(Path(folder)) as weights:
        placed = place(weights, ranks.device, torch.float32, ranks=ranks, dp_shard=2)
    made, told = 0, None
    try:
        with placed.together:
            for number in range(4):
                if ranks.rank == 1 and number == 1:
                    raise ValueError("a text that cannot be read")
                placed.model(torch.zeros(1, 4, dtype=torch.int64))
                made += 1
    except ValueError as error:
        told = str(error)
    return {"ranks": ranks.gather((made, told, placed.broken))}


def write(folder, **changes):
    """A folder in Hugging Face's form with weights that make sharp choices."""
    config = ModelConfig(**{"dim": 32, "layers": 3, "heads": 4, "kv_heads": 2, "ffn_dim": 56, "vocab_size": 160,
                            "context_length": 128, **changes})
    write_model(folder, opinionated(config), dtype=torch.float32, bos_id=1, eos_id=2)
    return folder
