"""A small engine on a group of one rank, and its batches."""

import numpy as np

from drover.model.config import ModelConfig
from drover.pipeline.config.training import TrainConfig
from drover.pipeline.config.tree import Config
from drover.pipeline.data.sampling.batch import pack
from drover.pipeline.parallel.fsdp import drawn
from drover.pipeline.parallel.grid import Grid
from drover.pipeline.training.set_up import build_engine

MODEL = ModelConfig(dim=32, layers=2, heads=2, kv_heads=1, ffn_dim=48, vocab_size=64, context_length=32)


def engine_of(ranks, dtype, tied=False, **train):
    """An engine for two micro-batches of two sequences each."""
    config = Config(train=TrainConfig(micro_batch=2, **train))
    model = MODEL.model_copy(update={"tied_embeddings": tied})
    return build_engine(config, model, Grid(ranks, config.parallel), dtype, 2, drawn(model, 0))


def batch_of(step=0):
    """Four sequences of two documents each."""
    random = np.random.default_rng(step)
    return pack([(random.integers(0, 64, 33), np.array([0, 9 + row])) for row in range(4)])
