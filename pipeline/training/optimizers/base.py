"""The interface of optimizers: one update that may be skipped, and the state by name.

To add an optimizer, change two files and add a test next to tests/training/optimizers/test_adamw.py:

1. A module here with a subclass of `Optimizer`. If torch.optim or a package has the optimizer already, a function that
   returns that `torch.optim.Optimizer` is enough. It is wrapped (`wrapped.py`), so that its gradients are clipped and
   rejected updates skipped, as for any other:

       def make(weights, config, grid):
           momentum = optimizer_settings(config.train)["momentum"]
           return torch.optim.SGD(parameter_groups(weights), lr=config.train.lr, momentum=momentum)

2. A line in OPTIMIZERS of pipeline/config/shipped.py: its place, its settings, and the bytes of its state, for the
   plan. Then `train.optimizer` accepts the name.

Outside of this package an optimizer is one module. It has the same function and, instead of the line, an
`OptimizerKind` of any name: `train.optimizer: mylab.sgd:SGD`. If that module imports torch only inside `make`, the
launcher stays fast.

Engines, checkpoints, guards, schedule and forecast use this interface and nothing more. A state tensor has the shape of
this rank's part of its parameter and is saved as `<state name>.<parameter>`, so a checkpoint can be continued under any
layout of ranks. Optimizers that need whole matrices get them from `whole_matrices.py`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from drover.pipeline.config.training import ParamGroup, TrainConfig
from drover.pipeline.config.tree import Config
from drover.pipeline.core.errors import UserError
from drover.pipeline.parallel.grid import Grid, own
from drover.pipeline.parallel.pipeline_parallel import parameter_names


@dataclass(frozen=True)
class Weight:
    """A parameter, as an optimizer is given it.

    Attributes:
        name: as in the checkpoint, e.g. `layers.0.attention.wq.weight`.
        parameter: a DTensor if it is sharded, as is its `grad`. `drover.pipeline.parallel.grid.own` returns the part in
            this rank's memory.
        weight_decay: its weight decay, to be multiplied by the learning rate.
        lr_factor: its factor on the schedule's learning rate.
    """

    name: str
    parameter: nn.Parameter
    weight_decay: float
    lr_factor: float

    @property
    def is_block_matrix(self) -> bool:
        """Whether it is a matrix within a block: no embedding, output matrix or norm."""
        return self.parameter.dim() == 2 and not self.name.startswith(("tok_embeddings.", "output."))


class Optimizer(ABC):
    """Updates the weights that it was made for.

    Its state exists from the start, as zeros, so that it can be saved and loaded before the first step.
    """

    @abstractmethod
    def state_names(self, name: str) -> tuple[str, ...]:
        """The names of parameter `name`'s states, the same on every rank."""

    @abstractmethod
    def state(self, name: str) -> dict[str, Tensor]:
        """The states of parameter `name` by `state_names`, not copies: this rank's part of each, with the shape and
        device of its part of the parameter. Checkpoints save them, and `load` writes into them."""

    @abstractmethod
    def step(self, lr: float, clip: Tensor, applied: Tensor) -> None:
        """One update of weights and state from the parameters' `grad`, called on every rank alike.

        Args:
            lr: the schedule's learning rate; each weight's is this times its `lr_factor`.
            clip: float64 scalar on the device, 1 or more. Divide the gradients by it first. They may be changed in
                place; the engine drops them.
            applied: bool scalar on the device, the same on every rank. If it is false, weights and state must stay
                equal to the last bit, although gradients may be NaN. Reading its value on the host waits for all queued
                work of the device.
        """

    @abstractmethod
    def resume(self, updates: int) -> None:
        """Continue after this many applied updates: sets counts that a formula needs. States are loaded separately."""


class ElementwiseOptimizer(Optimizer):
    """An optimizer that updates each element from its own gradient and state, so it can work on flat ranges of weights:
    DeepSpeed itself steps `torch`, over master weights that it puts in the place of parameters.

    Attributes:
        torch: torch's optimizer.
        names: of the states, the same for all parameters.
    """

    torch: torch.optim.Optimizer
    names: tuple[str, ...]

    def state_names(self, name: str) -> tuple[str, ...]:
        """See Optimizer."""
        return self.names

    @abstractmethod
    def state_of(self, tensor: Tensor) -> dict[str, Tensor]:
        """The states of a tensor in `torch`'s groups, by `names`; new ones are zeros."""

    @abstractmethod
    def resume_at(self, tensor: Tensor, updates: int) -> None:
        """`resume`, for one tensor in `torch`'s groups."""

    def set_lr(self, lr: float) -> None:
        """Give each group the schedule's learning rate times its own factor."""
        for group in self.torch.param_groups:
            group["lr"] = lr * group["lr_factor"]


Make = Callable[[Sequence[Weight], Config, Grid], "Optimizer | torch.optim.Optimizer"]
"""(weights, config, grid) -> an optimizer of all these weights. They are sharded as `grid` says; DeepSpeed replaces
them by flat ranges later. Settings: `config.train` and `optimizer_settings(config.train)`."""


def decays(name: str, tied: bool) -> bool:
    """Whether weight decay applies: not to norms, biases and embeddings, nor to an output matrix that is tied to the
    embedding."""
    return not (name.endswith(("norm.weight", ".bias")) or name.startswith("tok_embeddings.")
                or (tied and name.startswith("output.")))


def weights_of(model: nn.Module, train: TrainConfig, tied: bool) -> list[Weight]:
    """All parameters of a model with their weight decay and learning-rate factor.

    Raises:
        UserError: a pattern of train.param_groups matches no parameter.
    """
    names = parameter_names(model)
    for pattern in train.param_groups:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise UserError(f"train.param_groups: '{pattern}' matches no parameter. Some are {', '.join(names[:8])}.")
    weights = []
    for name, parameter in model.named_parameters():
        group = next((group for pattern, group in train.param_groups.items() if fnmatchcase(name, pattern)),
                     ParamGroup())
        decay = train.weight_decay if decays(name, tied) else 0.0
        weights.append(Weight(name, parameter, decay if group.weight_decay is None else group.weight_decay,
                              1.0 if group.lr is None else group.lr / train.lr))
    return weights


def parameter_groups(weights: Sequence[Weight]) -> list[dict[str, Any]]:
    """Weights in the form of torch's optimizers: a group with `params`, `weight_decay` and `lr_factor` for each
    combination of decay and factor, groups with decay first."""
    groups: dict[tuple[float, float], list[nn.Parameter]] = {}
    for weight in sorted(weights, key=lambda weight: weight.weight_decay == 0):  # else in the model's order
        groups.setdefault((weight.weight_decay, weight.lr_factor), []).append(weight.parameter)
    return [{"params": parameters, "weight_decay": decay, "lr_factor": factor}
            for (decay, factor), parameters in groups.items()]


def divide_gradients(weights: Iterable[Weight], divisor: float | Tensor) -> None:
    """Divide this rank's parts of the gradients in place; weights may have none."""
    torch._foreach_div_([own(weight.parameter.grad) for weight in weights if weight.parameter.grad is not None],
                        divisor)
