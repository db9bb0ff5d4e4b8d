"""Which engine trains: the one place where the configuration's choice is made."""

from __future__ import annotations

import torch

from model.config import ModelConfig
from pipeline.config.tree import Config
from pipeline.errors import UserError
from pipeline.parallel.grid import Grid
from pipeline.training.engine import Engine


def build_engine(config: Config, model: ModelConfig, grid: Grid, precision: torch.dtype, accumulation: int,
                 seed: int | None) -> Engine:
    """The configured engine around a model with its initial weights; seed None leaves them for a checkpoint."""
    train, parallel = config.train, config.parallel
    assert model.vocab_size is not None
    if model.vocab_size % parallel.tp:
        raise UserError(f"The vocabulary has {model.vocab_size} words, which parallel.tp ({parallel.tp}) does not "
                        f"divide. Set model.vocab_size to a multiple (the words beyond the tokenizer's are never "
                        f"used), or another parallel.tp.")
    if parallel.engine == "deepspeed":
        from pipeline.training.zero_engine import ZeroEngine
        return ZeroEngine(model, seed, grid.ranks, precision, train, parallel, accumulation)
    from pipeline.parallel.spreading import spread
    from pipeline.training.fsdp_engine import FsdpEngine
    from pipeline.training.optimizer import build_optimizer
    spread_model = spread(model, seed, grid, precision, train, parallel)
    return FsdpEngine(spread_model, build_optimizer(spread_model, train, model.tied_embeddings), grid,
                      train.clip_norm)
