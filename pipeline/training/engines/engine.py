"""The interface of engines: one optimizer step over micro-batches, and the state as named pieces.

Every engine computes the same: exact sums over uneven target counts, one global norm, one clip, and one update, which
the optimizer makes only if loss and norm are within the step's limits.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from drover.model.attention.choosing import Choice
from drover.model.attention.layout import PLAIN
from drover.model.loss import IGNORED
from drover.pipeline.core.console import first
from drover.pipeline.core.errors import UserError
from drover.pipeline.data.sampling.batch import Batch
from drover.pipeline.formats.sharded_tensors import CheckpointReader, Pieces
from drover.pipeline.parallel.attention import OWN
from drover.pipeline.parallel.pipeline_parallel import parameter_names
from drover.pipeline.training.guards import StepLimits
from drover.pipeline.training.optimizers.base import Optimizer

SCORES = ("wq", "wk", "q_norm", "k_norm")
"""The weights that only influence attention's scores."""


@dataclass(frozen=True)
class StepResult:
    """loss: mean nats per target token over the global batch; grad_norm: global, before clipping; applied: whether
    the weights were updated. The same on every rank."""

    loss: float
    grad_norm: float
    applied: bool


@dataclass(frozen=True)
class LocalWeights:
    """What this rank holds of a parameter, for comparing replicas: ranks with equal `place` must hold equal bits, and
    number themselves: this one is `copy` of `copies`."""

    name: str
    place: tuple[int, ...]
    tensor: Tensor
    copy: int
    copies: int


class Engine(ABC):
    """A model spread over ranks, with its optimizer.

    Attributes:
        model: call it on every rank alike, as one calls a Llama.
        updates: optimizer updates that were applied, which is the optimizer's own count of steps.
        across_documents: whether attention is plain causal attention, without a mask between documents.
        windowed: whether the model has layers with a sliding window.
        attention: what computes attention inside documents, and why not something better.
        flash: which flash kernels are used on GPUs (pipeline/parallel/attention.py).
        before_update: called in each step between its last backward pass and its update.
        proven: whether a step of this attempt gave every parameter a gradient (`prove_gradients`).
    """

    model: Any
    optimizer: Optimizer
    updates: int = 0
    across_documents: bool = False
    windowed: bool = False
    attention: Choice = Choice(PLAIN)
    flash: str = OWN
    before_update: Callable[[], None] = staticmethod(lambda: None)
    proven: bool = False
    _attending: int = 0

    @abstractmethod
    def step(self, micro_batches: Iterator[Batch], count: int, targets: int, lr: float,
             limits: StepLimits) -> StepResult:
        """Forward and backward over `count` micro-batches, then one update.

        Args:
            micro_batches: this rank's part of the global batch.
            count: how many there are.
            targets: target tokens of the *global* batch, over all ranks and micro-batches. Every token loss is
                divided by it, so that accumulation is exact however unevenly the targets fall.
            lr: learning rate of this update.
            limits: beyond them, or for a loss or norm that is NaN, the update is left out.
        """

    @abstractmethod
    def gradients(self) -> Pieces:
        """This rank's share of the gradients, summed over ranks and before clipping, by parameter; one that has none is
        missing. Only between the last backward pass of a step and its update."""

    @abstractmethod
    def state_shards(self) -> Pieces:
        """This rank's share of weights and the optimizer's states, by name; each element of the whole is in one piece
        on one rank.

        The tensors are the living ones, on their devices: copy them before the next step.
        """

    def held(self) -> Iterator[tuple[str, str, Tensor]]:
        """What this rank holds of each parameter, also within a step: (parameter, "model", "gradient" or the name of a
        state, tensor). By default the masters and states that it saves."""
        for key, shards in self.state_shards().items():
            kind, _, name = key.partition(".")
            yield from ((name, kind, shard.tensor) for shard in shards)

    def load(self, reader: CheckpointReader, updates: int) -> None:
        """Take weights and the optimizer's states from a checkpoint that any engine on any number of ranks has written.

        Raises:
            UserError: it was trained by another optimizer.
        """
        stored = set(reader.names())
        self.updates = updates
        wanted = [f"{state}.{name}" for name, _ in self.model.named_parameters()
                  for state in self.optimizer.state_names(name)]
        if missing := [tensor for tensor in wanted if tensor not in stored]:
            raise UserError(f"The checkpoint {reader.folder} does not hold {missing[0]}, nor {len(missing) - 1} more "
                            f"of {len(wanted)} states that train.optimizer has: another optimizer has trained it, "
                            f"whose states are of no use to this one. Set train.optimizer back to it (with "
                            f"--accept-changes, since the setting has changed meanwhile), or start from scratch with "
                            f"--force or name=<another>.")

    @abstractmethod
    def replicated_weights(self) -> Iterator[LocalWeights]:
        """The weights in this rank's memory of which other ranks hold copies."""

    @abstractmethod
    def free_unsharded(self) -> None:
        """Reshard the weights that a forward pass without a backward pass has all-gathered."""

    def loss(self, model: Any, batch: Batch) -> Tensor:
        """Sum of nats over a micro-batch's targets."""
        return model(**self.inputs(batch))

    def trial(self, batch: Batch, targets: int) -> None:
        """A forward and a backward pass over one sequence of a step's batch, for hooks that observe activations and
        gradients. Call it between two steps, and drop the gradients afterwards."""
        device = next(self.model.parameters()).device
        (self.loss(self.model, next(batch.split(1)).to(device)) / targets).backward()

    def inputs(self, batch: Batch) -> dict[str, Any]:
        """The model's arguments for a micro-batch."""
        if not self.proven:
            self._attending += int(((batch.labels != IGNORED) & (batch.positions > 0)).sum())
        arguments: dict[str, Any] = {"tokens": batch.tokens, "labels": batch.labels}
        if not self.across_documents:
            return {**arguments, "documents": batch.documents, "positions": batch.positions,
                    "document_lengths": [length for row in batch.lengths for length in row]}
        rows, length = batch.tokens.shape
        if self.windowed:  # plain causal attention knows no window: a row is one document to the backend
            return {**arguments, "documents": torch.zeros_like(batch.tokens), "document_lengths": [length] * rows}
        return arguments

    def prove_gradients(self, loss: float, device: torch.device) -> None:
        """Stop, on all ranks alike, if a parameter got no gradient in the first step of this start. A graph that was
        compiled or spread wrongly omits a parameter silently, and the loss falls nevertheless.

        loss: the step's mean loss. device: this rank's.

        It costs one all-reduce of an integer per parameter, once per start. A whole gradient of exact zeros has no
        other cause: some token occurs, and softmax gives every word a share. There are two exceptions: a loss of
        exactly 0, and the weights of attention scores (SCORES) if no target's token attends to another token.

        Raises:
            UserError: names the parameters.
        """
        names = parameter_names(self.model)
        shares = self.gradients()
        counts = [sum(int(piece.tensor.count_nonzero()) for piece in shares.get(name, ())) for name in names]
        total = torch.tensor([self._attending, *counts], dtype=torch.int64, device=device)
        dist.all_reduce(total)
        self.proven = True
        attending, *result = total.tolist()
        if loss != 0 and (missing := without_gradient(names, result, attending > 0)):
            raise UserError(missing)


def without_gradient(names: Sequence[str], counts: Sequence[int], attending: bool) -> str:
    """The error message for parameters that got no gradient; empty if all got one.

    Args:
        names: of all parameters.
        counts: of each, how many elements of its gradient are not zero, over all ranks.
        attending: whether any target's token attended to another one.
    """
    missing = [name for name, count in zip(names, counts, strict=True)
               if count == 0 and (attending or name.split(".")[-2] not in SCORES)]
    if not missing:
        return ""
    return (f"Training stopped in its first step, before any update: {first(missing)}, of {len(names)} "
            f"parameters, got no gradient (nothing but zeros, over all ranks) and would never be trained. No text "
            f"explains that: the model was compiled or spread wrongly, with torch {torch.__version__}. Set "
            f"train.compile=false, or another parallel.tp or parallel.engine, and report which settings did this.")
