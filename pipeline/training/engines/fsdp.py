"""The engine on FSDP2, with or without tensor parallelism. A single process uses the same code, without FSDP2 if
nothing is sharded."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from drover.pipeline.config.tree import Config
from drover.pipeline.data.sampling.batch import Batch
from drover.pipeline.formats.sharded_tensors import CheckpointReader, Pieces, TensorShard
from drover.pipeline.parallel.grid import Grid, own
from drover.pipeline.training.engines.engine import Engine, LocalWeights, StepResult
from drover.pipeline.training.guards import StepLimits
from drover.pipeline.training.optimizers.base import Optimizer


class FsdpEngine(Engine):
    """A model that `drover.pipeline.parallel.fsdp.parallelize` has placed, and an optimizer of its parts.

    keep_weights: whether all-gathered weights stay from one micro-batch to the next.
    reduce_last: whether gradients are reduced after the last micro-batch only.
    """

    def __init__(self, model: Any, optimizer: Optimizer, grid: Grid, config: Config) -> None:
        self.model = model  # with the methods that fully_shard adds
        self.sharded = isinstance(model, FSDPModule)  # a single process may need nothing of FSDP2
        self.optimizer = optimizer
        self.grid = grid
        self.clip_norm = config.train.clip_norm
        self.keep_weights = config.parallel.reshard == "never"
        self.reduce_last = config.parallel.reduce == "last"
        # While FSDP2 computes with all-gathered weights, `named_parameters` returns those, so keep the shards here.
        self.weights = dict(model.named_parameters())
        self.parts = {name: grid.part(weight) for name, weight in self.weights.items()}

    def step(self, micro_batches: Iterator[Batch], count: int, targets: int, lr: float,
             limits: StepLimits) -> StepResult:
        """See Engine."""
        self.model.train()
        total = self.accumulate(micro_batches, count, targets)
        sums = self._sum(torch.stack([total / targets, self._squared_norm()]))
        loss, norm = sums[0], sums[1].sqrt()
        # A comparison with NaN is false, so the limits reject NaN too. The device decides, so the host does not wait,
        # and the optimizer skips the update by itself.
        applied = (loss <= limits.loss) & (norm <= limits.grad_norm)
        if not self.proven:
            self.prove_gradients(float(loss), self.grid.ranks.exact)
        self.before_update()
        self.optimizer.step(lr, (norm / self.clip_norm).clamp(min=1.0), applied)
        self.model.zero_grad(set_to_none=True)
        values = torch.stack([loss, norm, applied.double()]).tolist()  # one transfer
        result = StepResult(values[0], values[1], bool(values[2]))
        self.updates += result.applied
        return result

    def accumulate(self, micro_batches: Iterator[Batch], count: int, targets: int) -> Tensor:
        """Forward and backward over all micro-batches; this rank's sum of nats, float64."""
        device = self.grid.ranks.device
        exact = self.grid.ranks.exact
        total = torch.zeros((), dtype=torch.float64, device=exact)
        for index, batch in enumerate(micro_batches):
            last = index == count - 1
            if self.sharded:
                self.model.set_is_last_backward(last)
                self.model.set_reshard_after_backward(last or not self.keep_weights)
                self.model.set_requires_gradient_sync(last or not self.reduce_last)
                self.model.set_requires_all_reduce(last)  # all-reduce replicas once a step, not once a micro-batch
            loss = self.loss(self.model, batch.to(device))
            (loss / targets).backward()
            total += loss.detach().to(exact)
        return total

    def _squared_norm(self) -> Tensor:
        """This rank's addend to the squared norm of the whole gradient. One of the ranks that hold a part adds it."""
        gradients = [gradient for name, gradient in self._gradients() if self.parts[name].copy == 0]
        if not gradients:
            return torch.zeros((), dtype=torch.float64, device=self.grid.ranks.exact)
        return torch.stack(torch._foreach_norm(gradients)).to(self.grid.ranks.exact).double().square().sum()

    def _gradients(self) -> Iterator[tuple[str, Tensor]]:
        for name, weight in self.weights.items():
            if weight.grad is not None:
                yield name, own(weight.grad)

    def _sum(self, values: Tensor) -> Tensor:
        """All-reduce. The loss is the same in a tensor group, so one rank of the group adds it."""
        if self.grid.tensor_rank != 0:
            values[0] = 0.0
        dist.all_reduce(values)
        return values

    def gradients(self) -> Pieces:
        """See Engine. All ranks that hold the same rectangle return it."""
        return {name: [TensorShard(gradient, self.parts[name].offset, tuple(self.weights[name].shape))]
                for name, gradient in self._gradients()}

    def state_shards(self) -> Pieces:
        """See Engine. Replicated pieces are distributed among the ranks that hold them."""
        result = {}
        for name, kind, tensor in self._state():
            part = self.parts[name]
            if zlib.crc32(name.encode()) % part.copies == part.copy:  # the same choice on all of these ranks
                result[f"{kind}.{name}"] = [TensorShard(tensor, part.offset, tuple(self.weights[name].shape))]
        return result

    def _state(self) -> Iterator[tuple[str, str, Tensor]]:
        for name, weight in self.weights.items():
            yield name, "model", own(weight.detach())
            yield from ((name, kind, tensor) for kind, tensor in self.optimizer.state(name).items())

    def held(self) -> Iterator[tuple[str, str, Tensor]]:
        """See Engine."""
        yield from self._state()
        yield from ((name, "gradient", gradient) for name, gradient in self._gradients())

    @torch.no_grad()
    def load(self, reader: CheckpointReader, updates: int) -> None:
        """See Engine."""
        super().load(reader, updates)
        self.optimizer.resume(updates)
        for name, kind, tensor in self._state():
            tensor.copy_(reader.read(f"{kind}.{name}", self.parts[name].offset, self.parts[name].size))

    def replicated_weights(self) -> Iterator[LocalWeights]:
        """See Engine."""
        for name, weight in self.weights.items():
            if (part := self.parts[name]).copies > 1:
                yield LocalWeights(name, part.offset, own(weight.detach()), part.copy, part.copies)

    def free_unsharded(self) -> None:
        """See Engine."""
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
