"""What the training loop knows of an engine: one optimizer step over micro-batches, and the state as named pieces.

Every engine computes the same: exact sums over uneven target counts, one global norm, one clip, one AdamW update,
which happens only if loss and norm are within the step's limits.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from pipeline.data.loader import Batch
from pipeline.formats.checkpoint import CheckpointReader, Piece
from pipeline.training.guards import Limits


@dataclass(frozen=True)
class StepResult:
    """loss: mean nats per target token over the global batch; grad_norm: global, before clipping; applied: whether
    the weights were updated. The same on every rank."""

    loss: float
    grad_norm: float
    applied: bool


@dataclass(frozen=True)
class LocalWeights:
    """What this rank holds of a parameter, for comparing replicas: ranks with equal `place` must hold equal bits."""

    name: str
    place: tuple[int, ...]
    tensor: Tensor


class Engine(ABC):
    """A model spread over ranks, with its optimizer.

    Attributes:
        model: call it on every rank alike, as one calls a Llama.
        updates: optimizer updates that were applied, which is AdamW's own count of steps.
        across_documents: whether attention is plain causal attention, without a mask between documents.
        loss_factor: what this rank's loss is multiplied by; other than 1 only where a test injects a fault.
        before_update: called in each step between its last backward pass and its update.
    """

    model: Any
    updates: int = 0
    across_documents: bool = False
    loss_factor: float = 1.0
    before_update: Callable[[], None] = staticmethod(lambda: None)

    @abstractmethod
    def step(self, micro_batches: Iterator[Batch], count: int, targets: int, lr: float, limits: Limits) -> StepResult:
        """Forward and backward over `count` micro-batches, then one update.

        Args:
            micro_batches: this rank's part of the global batch.
            count: how many there are.
            targets: target tokens of the *global* batch, over all ranks and micro-batches. Every token loss is
                divided by it, so that accumulation is exact however unevenly the targets fall.
            lr: learning rate of this update.
            limits: beyond them, or for a loss or norm that is no number, the update is left out.
        """

    @abstractmethod
    def pieces(self) -> dict[str, list[Piece]]:
        """This rank's share of weights and moments, by name; each element of the whole is in one piece on one rank.

        The tensors are the living ones, on their devices: copy them before the next step.
        """

    @abstractmethod
    def load(self, reader: CheckpointReader, updates: int) -> None:
        """Take weights and moments from a checkpoint that any engine on any number of ranks has written."""

    @abstractmethod
    def replicated_weights(self) -> Iterator[LocalWeights]:
        """The weights in this rank's memory of which other ranks hold copies."""

    @abstractmethod
    def rest(self) -> None:
        """Let go of what a pass without a backward pass has gathered."""

    def loss(self, model: Any, batch: Batch) -> Tensor:
        """Sum of nats over a micro-batch's targets."""
        apart: dict[str, Any] = {} if self.across_documents else \
            {"documents": batch.documents, "positions": batch.positions}
        loss: Tensor = model(batch.tokens, batch.labels, **apart)
        return loss if self.loss_factor == 1.0 else loss * self.loss_factor
