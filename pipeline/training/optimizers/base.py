"""What engines know of an optimizer: one update that may be left out, and its state by name.

To add an optimizer, two files change, and a test beside tests/training/optimizers/test_adamw.py:

1. A module here with a class of `Optimizer`. If torch.optim, or a package, has it already, a function is enough that
   returns that `torch.optim.Optimizer`; it is wrapped (`wrapped.py`), so that it is clipped and leaves rejected updates
   out like any other:

       def make(weights, config, grid):
           momentum = optimizer_settings(config.train)["momentum"]
           return torch.optim.SGD(parameter_groups(weights), lr=config.train.lr, momentum=momentum)

2. A line in OPTIMIZERS of pipeline/config/shipped.py, which says where that is, its settings, and the bytes of its
   state, for the plan. Then `train.optimizer` knows the name.

From outside of this package it is one module, with the same function and, instead of the line, an `OptimizerKind` of a
name of its choice: `train.optimizer: mylab.sgd:SGD`. Where that module imports torch only inside `make`, the launcher
stays as quick as it is.

What holds for all: engines, checkpoints, guards, schedule and forecast know this interface and nothing more. A state
tensor has the shape of this rank's part of its parameter and is saved as `<state name>.<parameter>`, so that a
checkpoint goes on under any layout of ranks. Whoever computes with whole matrices finds them in `whole_matrices.py`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from drover.pipeline.config.training import TrainConfig
from drover.pipeline.config.tree import Config
from drover.pipeline.core.errors import UserError
from drover.pipeline.parallel.grid import Grid
from drover.pipeline.parallel.pipeline_parallel import parameter_names


@dataclass(frozen=True)
class Weight:
    """A parameter as an optimizer gets it.

    name: as in the checkpoint, e.g. `layers.0.attention.wq.weight`. parameter: a DTensor where it is spread, and so is
    its `grad`; `drover.pipeline.parallel.grid.own` gives what is in this rank's memory. weight_decay: to be applied to
    it, times the learning rate. lr_factor: what the schedule's learning rate is multiplied by for it.
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

    Its state is there from the start, as zeros, so that it can be saved and filled in before the first step.
    """

    @abstractmethod
    def state_names(self, name: str) -> tuple[str, ...]:
        """What the states of parameter `name` are called, the same on every rank."""

    @abstractmethod
    def state(self, name: str) -> dict[str, Tensor]:
        """The living states of parameter `name` by `state_names`: this rank's part of each, shaped and placed like its
        part of the parameter. They are saved, and written into by `load`."""

    @abstractmethod
    def step(self, lr: float, clip: Tensor, applied: Tensor) -> None:
        """One update of weights and state from the parameters' `grad`, called on every rank alike.

        Args:
            lr: the schedule's learning rate; each weight's is this times its `lr_factor`.
            clip: float64 scalar on the device, 1 or more: gradients are to be divided by it first. They may be changed
                in place; the engine drops them.
            applied: bool scalar on the device, the same on every rank. Where it is false, weights and state stay as
                they are to the last bit, though gradients may be NaN. It is known to the device before the host: an
                optimizer that asks for its value here waits for all that is queued.
        """

    @abstractmethod
    def resume(self, updates: int) -> None:
        """Go on after so many applied updates: for counts that a formula needs. States are filled in apart."""


class ElementwiseOptimizer(Optimizer):
    """One that updates each element from that element's own gradient and state, so that it can work on flat ranges of
    weights: DeepSpeed drives `torch` by itself, over masters that it puts in the place of parameters.

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
        """The states of a tensor in `torch`'s groups, by `names`, made as zeros where there are none yet."""

    @abstractmethod
    def resume_at(self, tensor: Tensor, updates: int) -> None:
        """`resume`, for one tensor in `torch`'s groups."""

    def set_lr(self, lr: float) -> None:
        """Give each group the schedule's learning rate times its own factor."""
        for group in self.torch.param_groups:
            group["lr"] = lr * group["lr_factor"]


Make = Callable[[Sequence[Weight], Config, Grid], "Optimizer | torch.optim.Optimizer"]
"""(weights, config, grid) -> an optimizer of all these weights. They are placed as `grid` says, but under DeepSpeed,
which puts flat ranges in their place later. Settings: `config.train`, and `optimizer_settings(config.train)`."""


def decays(name: str, tied: bool) -> bool:
    """Whether weight decay applies: never to norms, biases and embeddings, nor to an output matrix that is the
    embedding."""
    return not (name.endswith(("norm.weight", ".bias")) or name.startswith("tok_embeddings.")
                or (tied and name.startswith("output.")))


def weights_of(model: nn.Module, train: TrainConfig, tied: bool) -> list[Weight]:
    """All parameters of a model with what the configuration says of each.

    Raises:
        UserError: a pattern of train.lr_factors fits no parameter.
    """
    names = parameter_names(model)
    for pattern in train.lr_factors:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise UserError(f"train.lr_factors: '{pattern}' fits no parameter. Some are {', '.join(names[:8])}.")
    found = []
    for name, parameter in model.named_parameters():
        factors = (factor for pattern, factor in train.lr_factors.items() if fnmatchcase(name, pattern))
        decay = train.weight_decay if decays(name, tied) else 0.0
        found.append(Weight(name, parameter, decay, next(factors, 1.0)))
    return found


def parameter_groups(weights: Sequence[Weight]) -> list[dict[str, Any]]:
    """Weights as torch's optimizers want them: a group, with `params`, `weight_decay` and `lr_factor`, for each decay
    and factor that there are, those that decay first."""
    groups: dict[tuple[float, float], list[nn.Parameter]] = {}
    for weight in sorted(weights, key=lambda weight: weight.weight_decay == 0):  # else in the model's order
        groups.setdefault((weight.weight_decay, weight.lr_factor), []).append(weight.parameter)
    return [{"params": parameters, "weight_decay": decay, "lr_factor": factor}
            for (decay, factor), parameters in groups.items()]


def gradients(weights: Sequence[Weight]) -> Iterator[Tensor]:
    """The gradients that there are."""
    for weight in weights:
        if weight.parameter.grad is not None:
            yield weight.parameter.grad
