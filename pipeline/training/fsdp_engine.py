"""The engine on FSDP2, with or without tensor parallelism; a single process takes the same path."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from model.llama import Llama
from pipeline.data.loader import Batch
from pipeline.formats.checkpoint import CheckpointReader, Piece
from pipeline.parallel.grid import Grid, own
from pipeline.training.engine import Engine, LocalWeights, StepResult
from pipeline.training.guards import Limits
from pipeline.training.optimizer import MOMENTS, moments_of


class FsdpEngine(Engine):
    """A model that `pipeline.parallel.spreading.spread` has placed, and AdamW over its parts.

    keep_weights: whether gathered weights stay from one micro-batch to the next.
    """

    def __init__(self, model: Llama, optimizer: torch.optim.AdamW, grid: Grid, clip_norm: float,
                 keep_weights: bool = False) -> None:
        self.model: Any = model  # with the methods that fully_shard adds
        self.optimizer: Any = optimizer
        self.grid, self.clip_norm, self.keep_weights = grid, clip_norm, keep_weights
        self.updates = 0
        self.wide = next(iter(model.parameters())).dtype == torch.float64
        self.parts = {name: grid.part(parameter) for name, parameter in model.named_parameters()}

    def step(self, micro_batches: Iterator[Batch], count: int, targets: int, lr: float, limits: Limits) -> StepResult:
        """See Engine."""
        self.model.train()
        device = self.grid.ranks.device
        total = torch.zeros((), dtype=torch.float64, device=device)
        for index, batch in enumerate(micro_batches):
            last = index == count - 1
            self.model.set_is_last_backward(last)
            self.model.set_reshard_after_backward(last or not self.keep_weights)
            self.model.set_requires_all_reduce(last)  # replicas of a shard meet once a step, not once a micro-batch
            loss = self.loss(self.model, batch.to(device))
            (loss / targets).backward()
            total += loss.detach()
        sums = self._sum(torch.stack([total / targets, self._squared_norm()]))
        loss, norm = sums[0], sums[1].sqrt()
        # A comparison with a number that is none is false, so the limits also catch those. Decided on the device:
        # nothing waits for it, and AdamW's kernel leaves the update out where `found_inf` is 1.
        applied = (loss <= limits.loss) & (norm <= limits.grad_norm)
        self.before_update()
        self._update(lr, norm, applied)
        values = torch.stack([loss, norm, applied.double()]).tolist()  # one transfer
        result = StepResult(values[0], values[1], bool(values[2]))
        self.updates += result.applied
        return result

    def _squared_norm(self) -> Tensor:
        """This rank's addend to the squared norm of the whole gradient; what several ranks hold, one of them adds."""
        gradients = [gradient for name, gradient in self._gradients() if self.parts[name].copy == 0]
        if not gradients:
            return torch.zeros((), dtype=torch.float64, device=self.grid.ranks.device)
        return torch.stack(torch._foreach_norm(gradients)).double().square().sum()

    def _gradients(self) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in self.model.named_parameters():
            if parameter.grad is not None:
                yield name, own(parameter.grad)

    def _sum(self, values: Tensor) -> Tensor:
        """Over all ranks; the loss is the same in a tensor group, so that one of the group adds it."""
        if self.grid.tensor_rank != 0:
            values[0] = 0.0
        dist.all_reduce(values)
        return values

    def _update(self, lr: float, norm: Tensor, applied: Tensor) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        excess = (norm / self.clip_norm).clamp(min=1.0)
        if self.wide:
            torch._foreach_div_([gradient for _, gradient in self._gradients()], excess)
        else:  # the kernel divides gradients by `grad_scale` while it reads them: clipping costs no pass of its own
            self.optimizer.grad_scale = excess.float()
        self.optimizer.found_inf = (~applied).float()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def pieces(self) -> dict[str, list[Piece]]:
        """See Engine. Copies of a piece are dealt out over the ranks that hold it."""
        found = {}
        for number, (name, parameter) in enumerate(self.model.named_parameters()):
            part, shape = self.parts[name], tuple(parameter.shape)
            if number % part.copies != part.copy:
                continue
            state = moments_of(self.optimizer, parameter)
            for kind, tensor in {"model": parameter.detach(), **{moment: state[moment] for moment in MOMENTS}}.items():
                found[f"{kind}.{name}"] = [Piece(own(tensor), part.offset, shape)]
        return found

    @torch.no_grad()
    def load(self, reader: CheckpointReader, updates: int) -> None:
        """See Engine."""
        self.updates = updates
        for name, parameter in self.model.named_parameters():
            part, state = self.parts[name], moments_of(self.optimizer, parameter)
            state["step"].fill_(updates)
            places = {"model": parameter, **{moment: state[moment] for moment in MOMENTS}}
            for kind, place in places.items():
                own(place).copy_(reader.read(f"{kind}.{name}", part.offset, part.size))

    def replicated_weights(self) -> Iterator[LocalWeights]:
        """See Engine."""
        for name, parameter in self.model.named_parameters():
            if self.parts[name].copies > 1:
                yield LocalWeights(name, self.parts[name].offset, own(parameter.detach()))

    def rest(self) -> None:
        """See Engine."""
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
