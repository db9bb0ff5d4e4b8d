"""Run by the tests under torchrun: a few optimizer steps on made-up packed data; rank 0 prints losses and norms."""

import json
import sys

import numpy as np
import torch

from model.config import ModelConfig
from pipeline.config.training import ParallelConfig, TrainConfig
from pipeline.data.loader import pack
from pipeline.parallel.ranks import start_ranks, stop_ranks
from pipeline.parallel.spreading import spread
from pipeline.training.engine import Engine
from pipeline.training.optimizer import build_optimizer

SEQUENCES, LENGTH, STEPS = 8, 48, 12


def windows(step):
    """The step's windows, with 0 to 5 document starts each: the targets fall unevenly over ranks."""
    random = np.random.default_rng(step)
    return [(random.integers(0, 384, LENGTH + 1), np.sort(random.choice(LENGTH + 1, count, replace=False)))
            for count in random.integers(0, 6, SEQUENCES)]


def main(precision, checkpointing, micro_batch, replicate, tied):
    """Train and print."""
    ranks = start_ranks()
    config = ModelConfig(dim=64, layers=3, heads=4, kv_heads=2, vocab_size=384, context_length=64,
                         tied_embeddings=tied)
    model = spread(config, 0, ranks.mesh(ParallelConfig(dp_replicate=replicate)), getattr(torch, precision),
                   checkpointing)
    engine = Engine(model, build_optimizer(model, TrainConfig(), tied), ranks, clip_norm=1.0)
    share, results = SEQUENCES // ranks.world, []
    for step in range(STEPS):
        batch = pack(windows(step)[ranks.rank * share:(ranks.rank + 1) * share])
        targets, = ranks.sum(batch.targets)
        result = engine.step(batch.split(micro_batch), share // micro_batch, int(targets), lr=1e-3)
        results.append([result.loss, result.grad_norm])
    if ranks.leads:
        print(json.dumps(results))
    stop_ranks()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), sys.argv[5] == "tied")
