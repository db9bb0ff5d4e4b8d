"""The engine on DeepSpeed's ZeRO, stages 1 to 3, with our optimizer, schedule and checkpoints.

ZeRO concatenates the flattened parameters and cuts the result into equal parts, one for each rank. So a rank owns a
range of a parameter's elements. In a checkpoint such a range is at most three rectangles of a matrix.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from deepspeed.utils import safe_get_local_grad
from torch import Tensor

from drover.model.attention.backend import Backend
from drover.model.config import ModelConfig
from drover.model.llama import Llama
from drover.pipeline.config.tree import Config
from drover.pipeline.data.sampling.batch import Batch
from drover.pipeline.formats.sharded_tensors import CheckpointReader, Pieces, TensorShard, rectangles
from drover.pipeline.formats.tensor_file import Dims
from drover.pipeline.parallel.fsdp import InitialValues
from drover.pipeline.parallel.ranks import Ranks
from drover.pipeline.parallel.zero import spread_by_zero
from drover.pipeline.training.engine import Engine, LocalWeights, StepResult
from drover.pipeline.training.guards import StepLimits
from drover.pipeline.training.optimizers import ElementwiseOptimizer

Read = Callable[[str, str, Dims, Dims], Tensor]
"""(kind, name, offset, size) -> that rectangle."""


@dataclass(frozen=True)
class Fragment:
    """The range of a parameter's elements whose master weights this rank owns: elements [start, start + count) of the
    parameter are elements [at, at + count) of the flat master."""

    master: Tensor
    at: int
    start: int
    count: int


class ZeroEngine(Engine):
    """A Llama under DeepSpeed.

    initial: None leaves the weights undefined until a checkpoint is loaded. make_optimizer: makes the optimizer of a
    model.
    """

    optimizer: ElementwiseOptimizer

    def __init__(self, model: ModelConfig, initial: InitialValues | None, ranks: Ranks, precision: torch.dtype,
                 config: Config, accumulation: int, attention: Backend,
                 make_optimizer: Callable[[Llama], ElementwiseOptimizer]) -> None:
        self.ranks = ranks
        self.stage = config.parallel.zero_stage
        self.allowed: Callable[[float], bool] = partial(StepLimits().allow, 0.0)

        def guarded(model: Llama) -> torch.optim.Optimizer:
            """The optimizer, which skips updates beyond the limits. DeepSpeed calls `step` several times a step, once
            its global norm is known, and has no hook for this decision."""
            self.optimizer = make_optimizer(model)
            inner = self.optimizer.torch
            update = self.optimizer.torch.step

            def step(closure: Any = None) -> None:
                if self.allowed(self._norm()):
                    update()
            inner.step = step  # type: ignore[method-assign, assignment]
            return inner

        self.zero: Any = spread_by_zero(model, ranks, precision, config.train, config.parallel, accumulation, attention,
                                        guarded)
        self.model: Any = self.zero.module
        self.names = dict(self.model.named_parameters())
        self.shapes = {name: tuple(getattr(parameter, "ds_shape", parameter.shape))
                       for name, parameter in self.names.items()}
        if initial is not None:
            self._fill(["model"], lambda _, name, offset, size: initial(name, self.shapes[name], offset, size))

    def compute(self, micro_batches: Iterator[Batch], count: int, targets: Tensor) -> None:
        """See Engine. Waits for the device, as does `update`: DeepSpeed decides on the host."""
        self.zero.train()
        divisor = float(targets)
        total = torch.zeros((), dtype=torch.float64, device=self.ranks.device)
        for index, batch in enumerate(micro_batches):
            loss = self.loss(self.zero, batch.to(self.ranks.device))
            total += loss.detach()
            # DeepSpeed averages gradients over ranks, and would average over micro-batches; here both are sums.
            self.zero.backward(loss * (self.ranks.world / divisor), scale_wrt_gas=False)
            if index < count - 1:
                self.zero.step()
        self.mean, = self.ranks.sum(float(total) / divisor)

    def update(self, lr: float, limits: StepLimits) -> None:
        """See Engine."""
        self.optimizer.set_lr(lr)
        # The norm is known only inside `step`, where the optimizer compares it with the limits.
        self.allowed = partial(limits.allow, self.mean)
        if not self.proven:
            self.prove_gradients(self.mean, self.ranks.device)
        self.before_update()
        self.zero.step()

    def result(self) -> StepResult:
        """See Engine."""
        norm = self._norm()
        applied = self.allowed(norm)
        self.updates += applied
        return StepResult(self.mean, norm, applied)

    def _norm(self) -> float:
        """The global norm of the gradients before clipping; if it is NaN, DeepSpeed returns inf or -1."""
        norm = float(self.zero.optimizer._global_grad_norm)
        return norm if norm >= 0 else float("nan")

    def gradients(self) -> Pieces:
        """See Engine."""
        result = {}
        for name, parameter in self.names.items():
            fragment = self._fragment(parameter)
            shape = self.shapes[name]
            if self.stage == 3:
                flat = safe_get_local_grad(parameter).flatten()
            elif fragment.count:
                flat = parameter._hp_mapping.get_lp_grad_fragment(parameter._index_in_param_group).flatten()
            else:
                continue
            complete = self.stage < 3 and len(flat) == torch.Size(shape).numel()  # stage 1 in bf16 keeps all of it
            result[name] = _cut(flat.narrow(0, fragment.start if complete else 0, fragment.count), shape, fragment)
        return result

    def state_shards(self) -> Pieces:
        """See Engine."""
        result: Pieces = {}
        for name, parameter in self.names.items():
            fragment = self._fragment(parameter)
            shape = self.shapes[name]
            for kind, flat in self._flat(fragment).items():
                owned = flat.detach().narrow(0, fragment.at, fragment.count)
                result[f"{kind}.{name}"] = _cut(owned, shape, fragment)
        return result

    def load(self, reader: CheckpointReader, updates: int) -> None:
        """See Engine."""
        super().load(reader, updates)
        self._fill(["model", *self.optimizer.names],
                   lambda kind, name, offset, size: reader.read(f"{kind}.{name}", offset, size))
        for parameter in self.names.values():
            self.optimizer.resume_at(self._fragment(parameter).master, updates)

    @torch.no_grad()
    def _fill(self, kinds: Sequence[str], read: Read) -> None:
        """Fill masters and states of these kinds, and the weights used in forward passes."""
        for name, parameter in self.names.items():
            fragment = self._fragment(parameter)
            shape = self.shapes[name]
            flat = self._flat(fragment)
            for kind in kinds:
                owned = flat[kind].data.narrow(0, fragment.at, fragment.count)
                for piece in _cut(owned, shape, fragment):
                    piece.tensor.copy_(read(kind, name, piece.offset, tuple(piece.tensor.shape)))
            if self.stage == 3:
                own = fragment.master.data.narrow(0, fragment.at, fragment.count)
                parameter.ds_tensor.data[:fragment.count].copy_(own)
            if self.stage < 3 or parameter.numel():  # in stage 3 too, small weights may stay whole on every rank
                parameter.data.copy_(read("model", name, (0,) * len(shape), shape))

    def _flat(self, fragment: Fragment) -> dict[str, Tensor]:
        """The flat master of a fragment and its states, by kind."""
        return {"model": fragment.master, **self.optimizer.state_of(fragment.master)}

    def _fragment(self, parameter: Any) -> Fragment:
        if self.stage == 3:
            zero = parameter._z3_optimizer
            group, at, count = zero.grad_position[zero.get_param_id(parameter)]
            start = min(parameter.ds_numel, zero._get_param_partition_rank(parameter) * count)
            count = min(count, parameter.ds_numel - start)  # the last rank's range has padding
            return Fragment(zero.fp32_partitioned_groups_flat[group], at, start, count)
        mapping = parameter._hp_mapping
        if mapping is None:  # other ranks own the whole parameter
            return Fragment(self.optimizer.torch.param_groups[0]["params"][0], 0, 0, 0)
        master = self.optimizer.torch.param_groups[mapping.param_group_index]["params"][0]
        return Fragment(master, mapping.hp_fragment_address.start, mapping.lp_fragment_address.start,
                        mapping.lp_fragment_address.numel)

    def replicated_weights(self) -> Iterator[LocalWeights]:
        """See Engine. Stage 3 replicates nothing."""
        for name, parameter in self.names.items():
            if self.stage < 3 and self.ranks.world > 1:
                yield LocalWeights(name, (0,) * parameter.dim(), parameter.data, self.ranks.rank, self.ranks.world)

    def free_unsharded(self) -> None:
        """See Engine. DeepSpeed reshards weights by itself."""


def _cut(flat: Tensor, shape: Dims, fragment: Fragment) -> list[TensorShard]:
    pieces = []
    at = 0
    for offset, size in rectangles(shape, fragment.start, fragment.start + fragment.count):
        count = torch.Size(size).numel()
        pieces.append(TensorShard(flat[at:at + count].view(size), offset, shape))
        at += count
    return pieces
