"""Muon for the blocks' matrices, AdamW for embeddings, output matrix and norms (Jordan et al. 2024).

A matrix's update is its momentum made orthogonal: all its singular values are brought near 1 by Newton-Schulz
iterations, so that rare directions are learned as fast as common ones. That needs the whole matrix (whole_matrices.py).
The momentum stays spread like the matrix, and so is saved as pieces that any layout reads.

The update is scaled to the size that AdamW's have (root mean square 0.2; Liu et al. 2025, "Muon is scalable for LLM
training"), so that lr, schedule and weight decay are shared by both.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from drover.model.loss import wide
from drover.pipeline.config.optimizers import optimizer_settings
from drover.pipeline.config.tree import Config
from drover.pipeline.core.errors import UserError
from drover.pipeline.parallel.grid import Grid, own
from drover.pipeline.training.optimizers.adamw import AdamW
from drover.pipeline.training.optimizers.base import Optimizer, Weight
from drover.pipeline.training.optimizers.whole_matrices import MatrixExchange

COEFFICIENTS = (3.4445, -4.775, 2.0315)
"""Of the polynomial a x + b x^3 + c x^5, applied to singular values in each iteration: five of them bring whatever is
above 0.003 or so to between 0.7 and 1.2. Jordan's choice, steep at 0."""
UPDATE_RMS = 0.2
"""Root mean square of an AdamW update over its learning rate, as measured by Liu et al."""
EPSILON = 1e-7
COMPUTED_IN = {"cuda": torch.bfloat16, "cpu": torch.float32}
"""The element type of the iterations by device: bfloat16 products are slow or absent on CPUs."""


class Muon(Optimizer):
    """Both optimizers over one model. Settings: momentum, nesterov, iterations (of Newton-Schulz).

    The element type of the iterations, in which matrices also travel: bfloat16 on GPUs as in the original, float32 on
    CPUs, where bfloat16 products are slow or absent; float64 where weights are.
    """

    def __init__(self, weights: Sequence[Weight], config: Config, grid: Grid) -> None:
        settings = optimizer_settings(config.train)
        self.decay = settings["momentum"]
        self.nesterov = settings["nesterov"]
        self.iterations = settings["iterations"]
        if not (0 <= self.decay < 1 and self.iterations > 0):
            raise UserError(f"train.optimizer_settings: momentum must be at least 0 and below 1, and iterations at "
                            f"least 1; they are {self.decay} and {self.iterations}.")
        self.matrices = [weight for weight in weights if weight.is_block_matrix]
        self.others = AdamW([weight for weight in weights if not weight.is_block_matrix], config)
        self.momentum = {weight.name: torch.zeros_like(own(weight.parameter.detach())) for weight in self.matrices}
        self.matrix_exchange = MatrixExchange({weight.name: weight.parameter for weight in self.matrices}, grid)
        self.dtype = torch.float64 if self.others.wide else COMPUTED_IN.get(grid.ranks.device.type, torch.float32)

    def state_names(self, name: str) -> tuple[str, ...]:
        """See Optimizer."""
        return ("momentum",) if name in self.momentum else self.others.state_names(name)

    def state(self, name: str) -> dict[str, Tensor]:
        """See Optimizer."""
        return {"momentum": self.momentum[name]} if name in self.momentum else self.others.state(name)

    def resume(self, updates: int) -> None:
        """See Optimizer."""
        self.others.resume(updates)

    @torch.no_grad()
    def step(self, lr: float, clip: Tensor, applied: Tensor) -> None:
        """See Optimizer. A rejected update is computed too, since only the device knows that it is rejected."""
        self.others.step(lr, clip, applied)
        directions = self._directions(clip, applied)
        updates = self.matrix_exchange.transform(directions, partial(orthogonal, iterations=self.iterations))
        for weight in self.matrices:
            local = own(weight.parameter)
            rate = lr * weight.lr_factor
            size = rate * UPDATE_RMS * math.sqrt(max(weight.parameter.shape))
            changed = local * (1 - rate * weight.weight_decay) - size * updates[weight.name].to(local.dtype)
            local.copy_(torch.where(applied, changed, local))

    def _directions(self, clip: Tensor, applied: Tensor) -> dict[str, Tensor]:
        """This rank's pieces of the matrices to orthogonalize. Updates the momentum."""
        names = [weight.name for weight in self.matrices]
        momenta = [self.momentum[name] for name in names]
        result = [torch.zeros_like(momentum) if weight.parameter.grad is None else own(weight.parameter.grad)
                 for weight, momentum in zip(self.matrices, momenta, strict=True)]
        torch._foreach_div_(result, clip)
        fresh = torch._foreach_lerp(momenta, result, 1 - self.decay)
        directions = torch._foreach_lerp(result, fresh, self.decay) if self.nesterov else fresh
        for momentum, new in zip(momenta, fresh, strict=True):
            momentum.copy_(torch.where(applied, new, momentum))
        return {name: direction.to(self.dtype) for name, direction in zip(names, directions, strict=True)}


def orthogonal(matrix: Tensor, iterations: int) -> Tensor:
    """U p(S) V^T of a matrix U S V^T, where p brings singular values near 1: Newton-Schulz with COEFFICIENTS.

    matrix: (rows, columns), float; not changed. The result has its shape, element type and device.
    """
    first, third, fifth = COEFFICIENTS
    tall = matrix.shape[0] > matrix.shape[1]
    value = matrix.T if tall else matrix  # the products are of the shorter side
    norm = torch.linalg.vector_norm(value, dtype=wide(value.dtype))
    value = value / norm.clamp(min=EPSILON).to(value.dtype)  # no singular value above 1
    for _ in range(iterations):
        square = value @ value.T
        polynomial = torch.addmm(square, square, square, beta=third, alpha=fifth)
        value = torch.addmm(value, polynomial, value, beta=first)
    return (value.T if tall else value).contiguous()
