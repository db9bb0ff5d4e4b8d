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
    tp = config.parallel.tp
    assert model.vocab_size is not None
    if model.vocab_size % tp:
        raise UserError(f"The vocabulary has {model.vocab_size} words, which parallel.tp ({tp}) does not divide. Set "
                        f"model.vocab_size to a multiple (the words beyond the tokenizer's are never used), or another "
                        f"parallel.tp.")
    make = _zero if config.parallel.engine == "deepspeed" else _fsdp
    engine = make(config, model, grid, precision, accumulation, seed)
    engine.across_documents = config.train.across_documents
    return engine


def _fsdp(config: Config, model: ModelConfig, grid: Grid, precision: torch.dtype, accumulation: int,
          seed: int | None) -> Engine:
    from pipeline.parallel.spreading import spread
    from pipeline.training.fsdp_engine import FsdpEngine
    from pipeline.training.optimizer import build_optimizer
    train = config.train
    spread_model = spread(model, seed, grid, precision, train, config.parallel)
    return FsdpEngine(spread_model, build_optimizer(spread_model, train, model.tied_embeddings), grid,
                      train.clip_norm, keep_weights=config.parallel.reshard == "never")


def _zero(config: Config, model: ModelConfig, grid: Grid, precision: torch.dtype, accumulation: int,
          seed: int | None) -> Engine:
    from pipeline.training.zero_engine import ZeroEngine
    return ZeroEngine(model, seed, grid.ranks, precision, config.train, config.parallel, accumulation)
