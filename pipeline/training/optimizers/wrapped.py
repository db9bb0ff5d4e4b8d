"""Any `torch.optim.Optimizer` behind our interface: gradients are clipped before it steps, and it does not step if the
update is rejected.

torch's optimizers do neither, apart from fused Adam's `found_inf` and `grad_scale`. On their own they would train
unclipped and apply updates that the guards have rejected. The host decides whether to step, so it waits for the device
once a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from drover.pipeline.core.errors import UserError
from drover.pipeline.parallel.grid import own
from drover.pipeline.training.optimizers.base import Optimizer, Weight, divide_gradients

COUNT = "step"
"""The only state that may be a number: the count of updates. It is not saved; `resume` sets it."""


class Wrapped(Optimizer):
    """Weights that `inner` updates, with states that start as zeros.

    Each group's learning rate is the schedule's times its `lr_factor`. Without one, the factor is the ratio of the
    group's initial `lr` to `lr`. SGD's momentum starts as zeros too, while torch starts it as the first gradient: with
    `dampening` the first update is smaller by that factor.

    Args:
        lr: train.lr, with which `inner` was made.

    Raises:
        UserError: `inner` omits a weight, cannot step without a closure, or keeps a state that cannot be saved and
            loaded: one that is neither a count `step` nor zeros of the parameter's shape at the start.
    """

    def __init__(self, weights: Sequence[Weight], inner: torch.optim.Optimizer, lr: float) -> None:
        self.weights = {weight.name: weight for weight in weights}
        self.inner = inner
        self.kind = type(inner).__name__
        held = {id(tensor) for group in inner.param_groups for tensor in group["params"]}
        if missing := [weight.name for weight in weights if id(weight.parameter) not in held]:
            raise UserError(f"The optimizer {self.kind} was given {len(weights)} parameters and holds {len(held)}; "
                            f"{missing[0]} would never be trained. Give it all of them, e.g. by parameter_groups.")
        self.factors = [group.get("lr_factor", float(group["lr"]) / lr) for group in inner.param_groups]
        self._make_states()
        self.names = {name: self._check_states(weight) for name, weight in self.weights.items()}
        self.resume(0)

    def state_names(self, name: str) -> tuple[str, ...]:
        """See Optimizer."""
        return self.names[name]

    def state(self, name: str) -> dict[str, Tensor]:
        """See Optimizer."""
        result: dict[str, Any] = self.inner.state[self.weights[name].parameter]
        return {state: own(result[state]) for state in self.names[name]}

    def step(self, lr: float, clip: Tensor, applied: Tensor) -> None:
        """See Optimizer."""
        if not bool(applied):
            return
        divide_gradients(self.weights.values(), clip)
        for group, factor in zip(self.inner.param_groups, self.factors, strict=True):
            group["lr"] = lr * factor
        self.inner.step()

    def resume(self, updates: int) -> None:
        """See Optimizer."""
        for weight in self.weights.values():
            state = self.inner.state[weight.parameter]
            if isinstance(state.get(COUNT), Tensor):
                state[COUNT].fill_(updates)
            elif COUNT in state:
                state[COUNT] = updates

    @torch.no_grad()
    def _make_states(self) -> None:
        """Let `inner` make its states. Most optimizers do so in their first step, so take one with learning rate 0 and
        gradients of zero. Weights are zero as well: some optimizers add weights to gradients for their decay."""
        before = {name: own(weight.parameter).clone() for name, weight in self.weights.items()}
        for weight in self.weights.values():
            weight.parameter.grad = torch.zeros_like(weight.parameter)
            own(weight.parameter).zero_()  # before a checkpoint is read it may hold anything
        for group in self.inner.param_groups:
            group["lr"] = 0.0
        try:
            self.inner.step()
        except TypeError as error:
            raise UserError(f"The optimizer {self.kind} cannot be stepped without a closure ({error}): a step of "
                            f"training computes its gradients once.") from error
        for name, weight in self.weights.items():
            own(weight.parameter).copy_(before[name])
            weight.parameter.grad = None

    def _check_states(self, weight: Weight) -> tuple[str, ...]:
        """The names of a weight's states that are saved."""
        names = []
        for state, value in self.inner.state[weight.parameter].items():
            if state == COUNT or value is None:
                continue
            if not isinstance(value, Tensor) or value.shape != weight.parameter.shape:
                raise UserError(f"The optimizer {self.kind} keeps '{state}' of {weight.name}, which does not have the "
                                f"parameter's shape, so it could not be saved for any layout of ranks. Write it as an "
                                f"Optimizer (pipeline/training/optimizers/base.py), or use another.")
            if own(value).count_nonzero():
                raise UserError(f"The optimizer {self.kind} starts with '{state}' of {weight.name} other than zeros, "
                                f"which a checkpoint could not restore. Write it as an Optimizer "
                                f"(pipeline/training/optimizers/base.py), or use another.")
            names.append(state)
        return tuple(names)
