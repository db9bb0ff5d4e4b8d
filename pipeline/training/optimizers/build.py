"""The configured optimizer of a model that is on its devices."""

from __future__ import annotations

import torch
from torch import nn

from drover.pipeline.config.optimizers import optimizer_kind
from drover.pipeline.config.tree import Config
from drover.pipeline.core.errors import UserError
from drover.pipeline.parallel.grid import Grid
from drover.pipeline.training.optimizers.base import ElementwiseOptimizer, Optimizer, weights_of
from drover.pipeline.training.optimizers.wrapped import Wrapped


def build_optimizer(model: nn.Module, config: Config, grid: Grid, tied: bool) -> Optimizer:
    """train.optimizer over all parameters of `model`. A torch.optim.Optimizer is wrapped, so that it clips gradients
    and skips updates that the guards reject.

    tied: whether the output matrix is the embedding.

    Raises:
        UserError: it cannot be imported, or does not make an optimizer.
    """
    train = config.train
    weights = weights_of(model, train, tied)
    made = optimizer_kind(train.optimizer).maker()(weights, config, grid)
    if isinstance(made, torch.optim.Optimizer):
        return Wrapped(weights, made, train.lr)
    if not isinstance(made, Optimizer):
        raise UserError(f"train.optimizer '{train.optimizer}' made a {type(made).__name__}, which is neither an "
                        f"Optimizer (pipeline/training/optimizers/base.py) nor a torch.optim.Optimizer: updates could "
                        f"not be clipped or skipped.")
    return made


def build_elementwise(model: nn.Module, config: Config, grid: Grid, tied: bool) -> ElementwiseOptimizer:
    """The same for DeepSpeed, which flattens weights; UserError if it is not an `ElementwiseOptimizer`."""
    made = build_optimizer(model, config, grid, tied)
    if not isinstance(made, ElementwiseOptimizer):
        raise UserError(f"train.optimizer '{config.train.optimizer}' cannot update flat ranges of weights, which "
                        f"parallel.engine=deepspeed requires. Set parallel.engine=fsdp2.")
    return made
