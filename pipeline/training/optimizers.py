"""Optimizers: one update that may be skipped, and the state by name. Here are the interface, AdamW, any optimizer of
torch behind the interface, the choice of the configured one, and the learning rate of a step.

To add an optimizer, write it and its line, and a test next to tests/training/test_optimizers.py:

1. A subclass of `Optimizer`. If torch.optim or a package has the optimizer already, a function that returns that
   `torch.optim.Optimizer` is enough. It is wrapped (`Wrapped`), so that its gradients are clipped and rejected updates
   skipped, as for any other:

       def make(weights, config, grid):
           momentum = optimizer_settings(config.train)["momentum"]
           return torch.optim.SGD(parameter_groups(weights), lr=config.train.lr, momentum=momentum)

2. A line in OPTIMIZERS of pipeline/config/shipped.py: its place, its settings, and the bytes of its state, for the
   plan. Then `train.optimizer` accepts the name.

Outside of Drover an optimizer is one module. It has the same function and, instead of the line, an `OptimizerKind` of
any name: `train.optimizer: mylab.sgd:SGD`. If that module imports torch only inside `make`, the launcher stays fast.

Engines, checkpoints, guards, schedule and forecast use this interface and nothing more. A state tensor has the shape of
this rank's part of its parameter and is saved as `<state name>.<parameter>`, so a checkpoint can be continued under any
layout of ranks. Optimizers that need whole matrices get them from a `MatrixExchange` (muon.py).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from drover.pipeline.config.optimizers import optimizer_kind
from drover.pipeline.config.phases import PhasePlan
from drover.pipeline.config.training import ParamGroup
from drover.pipeline.config.tree import Config
from drover.pipeline.core.errors import UserError
from drover.pipeline.parallel.grid import Grid, own
from drover.pipeline.parallel.pipeline_parallel import parameter_names
from drover.pipeline.training.mup import is_block_matrix, rate_factor


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
        return is_block_matrix(self.name)


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
                equal to the last bit, although gradients may be NaN. Reading its value on the host would wait for all
                queued work of the device, in every step.
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
    """Whether weight decay applies: not to norms and embeddings, nor to an output matrix that is tied to the
    embedding."""
    return not (name.endswith("norm.weight") or name.startswith("tok_embeddings.")
                or (tied and name.startswith("output.")))


def weights_of(model: nn.Module, config: Config, tied: bool) -> list[Weight]:
    """All parameters of a model with their weight decay and learning-rate factor. Where muP lowers the rate, the decay
    is higher, so that a step decays as much at each width.

    Raises:
        UserError: a pattern of train.param_groups matches no parameter.
    """
    train = config.train
    names = parameter_names(model)
    for pattern in train.param_groups:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise UserError(f"train.param_groups: '{pattern}' matches no parameter. Some are {', '.join(names[:8])}.")
    weights = []
    for name, parameter in model.named_parameters():
        group = next((group for pattern, group in train.param_groups.items() if fnmatchcase(name, pattern)),
                     ParamGroup())
        usual = train.weight_decay if decays(name, tied) else 0.0
        decay = usual if group.weight_decay is None else group.weight_decay
        factor = rate_factor(name, config)
        weights.append(Weight(name, parameter, decay / factor,
                              factor if group.lr is None else factor * group.lr / train.lr))
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


MOMENTS = ("exp_avg", "exp_avg_sq")
"""AdamW's state, by torch's names; in a checkpoint `exp_avg.<parameter>`, next to `model.<parameter>`."""


class AdamW(ElementwiseOptimizer):
    """Clips gradients and skips updates inside the fused kernel: neither costs a pass over the weights, and nothing
    waits for the host.
    """

    names = MOMENTS

    def __init__(self, weights: Sequence[Weight], config: Config, grid: Grid | None = None) -> None:
        train = config.train
        self.weights = {weight.name: weight for weight in weights}
        self.wide = any(weight.parameter.dtype == torch.float64 for weight in weights)
        # The fused kernel cannot update flat masters on the host from gradients on a GPU.
        self.fused = config.parallel.offload == "none"
        self.torch = torch.optim.AdamW(parameter_groups(weights), lr=train.lr, betas=(train.beta1, train.beta2),
                                       eps=train.eps, fused=self.fused)

    def state(self, name: str) -> dict[str, Tensor]:
        """See Optimizer."""
        return {moment: own(tensor) for moment, tensor in self.state_of(self.weights[name].parameter).items()}

    def state_of(self, tensor: Tensor) -> dict[str, Tensor]:
        """See ElementwiseOptimizer. torch itself would make them in the first step only."""
        return {moment: self._all_of(tensor)[moment] for moment in MOMENTS}

    def step(self, lr: float, clip: Tensor, applied: Tensor) -> None:
        """See Optimizer."""
        self.set_lr(lr)
        kernel = self.torch
        if self.wide:  # the kernel takes its divisor in float32
            divide_gradients(self.weights.values(), clip)
        else:  # it divides gradients by `grad_scale` while it reads them: clipping costs no pass of its own
            kernel.grad_scale = clip.float()  # type: ignore[attr-defined]
        kernel.found_inf = (~applied).float()  # type: ignore[attr-defined]  # where it is 1 the update is left out
        kernel.step()

    def resume_at(self, tensor: Tensor, updates: int) -> None:
        """See ElementwiseOptimizer."""
        self._all_of(tensor)["step"].fill_(updates)

    def resume(self, updates: int) -> None:
        """See Optimizer."""
        for weight in self.weights.values():
            self.resume_at(weight.parameter, updates)

    def _all_of(self, tensor: Tensor) -> dict[str, Tensor]:
        """The state of a tensor, `step` included."""
        state: dict[str, Tensor] = self.torch.state[tensor]
        if not state:
            # The fused kernel needs the count on the parameter's device, the others on the host.
            state["step"] = torch.zeros((), dtype=torch.float32, device=tensor.device if self.fused else "cpu")
            state.update({moment: torch.zeros_like(tensor.detach()) for moment in MOMENTS})
        return state


COUNT = "step"
"""The only state that may be a number: the count of updates. It is not saved; `resume` sets it."""


class Wrapped(Optimizer):
    """Weights that `inner` updates, with states that start as zeros.

    Whether an update is applied is read on the host, which waits for the device: torch's optimizers in general have no
    way to leave an update out.

    Each group's learning rate is the schedule's times its `lr_factor`. Without one, the factor is the ratio of the
    group's initial `lr` to `lr`. SGD's momentum starts as zeros too, while torch starts it as the first gradient: with
    `dampening` the first update is smaller by that factor.

    Args:
        lr: train.lr, with which `inner` was made.

    Raises:
        UserError: `inner` omits a weight, or keeps a state that cannot be saved and
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
        self.inner.step()
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
                                f"Optimizer (pipeline/training/optimizers.py), or use another.")
            if own(value).count_nonzero():
                raise UserError(f"The optimizer {self.kind} starts with '{state}' of {weight.name} other than zeros, "
                                f"which a checkpoint could not restore. Write it as an Optimizer "
                                f"(pipeline/training/optimizers.py), or use another.")
            names.append(state)
        return tuple(names)


def build_optimizer(model: nn.Module, config: Config, grid: Grid, tied: bool) -> Optimizer:
    """train.optimizer over all parameters of `model`. A torch.optim.Optimizer is wrapped, so that it clips gradients
    and skips updates that the guards reject.

    tied: whether the output matrix is the embedding.

    Raises:
        UserError: it cannot be imported, or does not make an optimizer.
    """
    train = config.train
    weights = weights_of(model, config, tied)
    made = optimizer_kind(train.optimizer).maker()(weights, config, grid)
    if isinstance(made, torch.optim.Optimizer):
        return Wrapped(weights, made, train.lr)
    if not isinstance(made, Optimizer):
        raise UserError(f"train.optimizer '{train.optimizer}' made a {type(made).__name__}, which is neither an "
                        f"Optimizer (pipeline/training/optimizers.py) nor a torch.optim.Optimizer: updates could "
                        f"not be clipped or skipped.")
    return made


def build_elementwise(model: nn.Module, config: Config, grid: Grid, tied: bool) -> ElementwiseOptimizer:
    """The same for DeepSpeed, which flattens weights; UserError if it is not an `ElementwiseOptimizer`."""
    made = build_optimizer(model, config, grid, tied)
    if not isinstance(made, ElementwiseOptimizer):
        raise UserError(f"train.optimizer '{config.train.optimizer}' cannot update flat ranges of weights, which "
                        f"parallel.engine=deepspeed requires. Set parallel.engine=fsdp2.")
    return made


def planned_rate(step: int, plan: PhasePlan) -> float:
    """Learning rate of optimizer step `step`, counted from 0, over the phases of a plan.

    Phases that say something of their learning rate begin a curve, which lasts until the next that does; without one it
    is train's own. Linear warmup reaches the rate at the last warmup step. Cosine and linear then fall to the curve's
    end at its last step; wsd stays, and falls linearly to it over the last `decay_steps` (Hu et al. 2024).
    """
    begins = [phase for phase in plan.phases
              if phase.number == 0 or (phase.own is not None and phase.own.begins_curve)]
    now = plan.phase_of(step + 1).number
    phase = [phase for phase in begins if phase.number <= now][-1]
    end_step = min([plan.steps, *(later.first_step for later in begins if later.number > phase.number)])
    at = step - phase.first_step
    steps = max(1, end_step - phase.first_step)
    train = phase.train
    own = phase.own
    rate, warmup, form = train.lr, train.warmup_steps, str(train.schedule)
    if own is not None and own.begins_curve:
        if phase.number > 0:
            warmup = 0
        if own.lr is not None:
            rate = own.lr
        elif phase.number > 0:
            rate = planned_rate(phase.first_step - 1, plan)
        warmup = warmup if own.warmup_steps is None else own.warmup_steps
        form = own.schedule or ("constant" if own.lr_end is None else "linear")
    end = rate * train.min_lr_share if own is None or own.lr_end is None else own.lr_end
    if at < warmup:
        return rate * (at + 1) / warmup
    if form == "constant":
        return rate
    done = min(1.0, (at - warmup) / max(1, steps - 1 - warmup))
    left = {"linear": 1.0 - done, "cosine": 0.5 * (1 + math.cos(math.pi * done)),
            "wsd": min(1.0, max(0.0, (steps - 1 - at) / (train.decay_steps or max(1, steps // 5))))}[form]
    return end + (rate - end) * left
