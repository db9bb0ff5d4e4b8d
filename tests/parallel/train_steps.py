"""Run by the tests under torchrun: optimizer steps on made-up packed data; rank 0 prints losses and norms as JSON."""

import hashlib
import json
import sys
import warnings

import numpy as np
import torch

from model.config import ModelConfig
from pipeline.config.parallel import ParallelConfig
from pipeline.config.training import TrainConfig
from pipeline.config.tree import Config
from pipeline.data.loader import pack
from pipeline.entry import end_process
from pipeline.parallel.grid import Grid
from pipeline.parallel.ranks import start_ranks, stop_ranks
from pipeline.training.engines import build_engine
from pipeline.training.guards import Limits
from pipeline.training.schedule import learning_rate

SEQUENCES, LENGTH = 8, 48
LR = 5e-4
MODEL = ModelConfig(dim=64, layers=3, heads=4, kv_heads=2, vocab_size=384, context_length=64)


def windows(step):
    """The step's windows, with 0 to 5 document starts each: the targets fall unevenly over ranks."""
    random = np.random.default_rng(step)
    return [(random.integers(0, 384, LENGTH + 1), np.sort(random.choice(LENGTH + 1, count, replace=False)))
            for count in random.integers(0, 6, SEQUENCES)]


def digest(parts):
    """Hash of the whole weights that the ranks' pieces make up, in float32; rank 0's answer."""
    whole = {}
    for name, pieces in ((name, pieces) for part in parts for name, pieces in part.items()):
        for piece in pieces:
            if name.startswith("model."):
                place = whole.setdefault(name, torch.full(piece.shape, torch.nan))
                place[tuple(slice(a, a + n) for a, n in zip(piece.offset, piece.tensor.shape, strict=True))] = \
                    piece.tensor.detach().float()
    return hashlib.sha256(b"".join(whole[name].numpy().tobytes() for name in sorted(whole))).hexdigest()


def main(precision="fp64", steps=12, micro_batch=8, tied=False, train=None, parallel=None):
    """Train and print."""
    ranks = start_ranks()
    model = MODEL.model_copy(update={"tied_embeddings": tied})
    config = Config(model=model, parallel=ParallelConfig(**parallel or {}),
                    train=TrainConfig(precision=precision, micro_batch=micro_batch, steps=steps, lr=LR,
                                      warmup_steps=steps // 5, **train or {}))
    grid = Grid(ranks, config.parallel)
    share, results = SEQUENCES // grid.data_ranks, []
    dtype = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16}[precision]
    engine = build_engine(config, model, grid, dtype, share // micro_batch, seed=0)
    initial = digest(ranks.collect(engine.pieces()))
    for step in range(steps):
        batch = pack(windows(step)[grid.data_rank * share:(grid.data_rank + 1) * share])
        targets = pack(windows(step)).targets
        result = engine.step(batch.split(micro_batch), share // micro_batch, targets,
                             learning_rate(step, config.train), Limits())
        results.append([result.loss, result.grad_norm])
    if ranks.leads:
        print(json.dumps({"results": results, "initial": initial}))
    stop_ranks()


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main(**json.loads(sys.argv[1]))
    end_process(0)
