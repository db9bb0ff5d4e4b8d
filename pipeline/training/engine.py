"""One optimizer step over micro-batches: exact sums, one clip, one update. The loop sees only this."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from model.llama import Llama
from pipeline.data.loader import Batch
from pipeline.parallel.ranks import Ranks


@dataclass(frozen=True)
class StepResult:
    """loss: mean nats per target token over the global batch; grad_norm: global, before clipping."""

    loss: float
    grad_norm: float

    def finite(self) -> bool:
        """Whether the update may be applied. The same on every rank, since both numbers are."""
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm)


class Engine:
    """The sharded model and its optimizer."""

    def __init__(self, model: Llama, optimizer: torch.optim.Optimizer, ranks: Ranks, clip_norm: float) -> None:
        self.model, self.optimizer, self.ranks, self.clip_norm = model, optimizer, ranks, clip_norm

    def step(self, micro_batches: Iterator[Batch], count: int, targets: int, lr: float) -> StepResult:
        """Forward and backward over `count` micro-batches, then one update.

        Args:
            micro_batches: this rank's part of the global batch.
            count: how many there are.
            targets: target tokens of the *global* batch, over all ranks and micro-batches. Every token loss is
                divided by it, so that accumulation is exact however unevenly the targets fall.
            lr: learning rate of this update.
        """
        model: Any = self.model  # with the methods that fully_shard adds
        model.train()
        total = torch.zeros((), dtype=torch.float64, device=self.ranks.device)
        for index, batch in enumerate(micro_batches):
            last = index == count - 1
            model.set_is_last_backward(last)
            model.set_requires_all_reduce(last)  # replicas of a shard meet once a step, not once a micro-batch
            batch = batch.to(self.ranks.device)
            loss = model(batch.tokens, batch.labels, documents=batch.documents, positions=batch.positions)
            (loss / targets).backward()
            total += loss.detach().double()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), self.clip_norm, foreach=True)
        grad_norm = norm.full_tensor() if isinstance(norm, DTensor) else norm  # a collective: every rank takes part
        loss_sum, = self.ranks.sum(float(total))
        result = StepResult(loss_sum / targets, float(grad_norm))
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        if result.finite():
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return result
