"""Engines: one optimizer step over micro-batches, and the state as named pieces. Here are their interface, the engine
on FSDP2, and that for pipeline parallelism; zero.py has DeepSpeed's.

Every engine computes the same: exact sums over uneven target counts, one global norm, one clip, and one update, which
the optimizer makes only if loss and norm are within the step's limits. The device decides that, so the host need not
wait for a step before it queues the next one.
"""

from __future__ import annotations

import dataclasses
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from drover.model.attention.backend import Choice
from drover.model.attention.module import PLAIN
from drover.model.loss import IGNORED
from drover.pipeline.config.tree import Config
from drover.pipeline.core.console import first
from drover.pipeline.core.errors import UserError
from drover.pipeline.data.sampling.batch import Batch
from drover.pipeline.formats.sharded_tensors import CheckpointReader, Pieces, TensorShard
from drover.pipeline.parallel.blocks import OWN
from drover.pipeline.parallel.grid import Grid, own
from drover.pipeline.parallel.pipeline_parallel import PipelinedModel, make_schedule, parameter_names
from drover.pipeline.parallel.ranks import Transfer
from drover.pipeline.training.guards import StepLimits
from drover.pipeline.training.optimizers import Optimizer

TIED = "tok_embeddings.weight"
"""The parameter that the first and the last stage both hold if embeddings are tied."""
SCORES = ("wq", "wk")
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
        updates: optimizer updates that were applied and read, which is the optimizer's own count of steps.
        queues: whether the device works through a queue, so that the host gains by reading a step's result late.
        across_documents: whether attention is plain causal attention, without a mask between documents.
        attention: what computes attention inside documents, and why not something better.
        flash: which flash kernels are used on GPUs (pipeline/parallel/blocks.py).
        before_update: called in each step between its last backward pass and its update.
        proven: whether a step of this attempt gave every parameter a gradient (`prove_gradients`).
    """

    model: Any
    optimizer: Optimizer
    updates: int = 0
    queues: bool = False
    across_documents: bool = False
    attention: Choice = Choice(PLAIN)
    flash: str = OWN
    before_update: Callable[[], None] = staticmethod(lambda: None)
    proven: bool = False
    _attending: int = 0

    def step(self, micro_batches: Iterator[Batch], count: int, targets: int, lr: float,
             limits: StepLimits) -> StepResult:
        """`compute`, `update` and `result` of one step."""
        self.compute(micro_batches, count, torch.tensor(targets, dtype=torch.float64))
        self.update(lr, limits)
        return self.result()

    @abstractmethod
    def compute(self, micro_batches: Iterator[Batch], count: int, targets: Tensor) -> None:
        """Forward and backward over `count` micro-batches.

        Args:
            micro_batches: this rank's part of the global batch.
            count: how many there are.
            targets: target tokens of the *global* batch, over all ranks and micro-batches, as a float64 scalar. Every
                token loss is divided by it, so that accumulation is exact however unevenly the targets fall.
        """

    @abstractmethod
    def update(self, lr: float, limits: StepLimits) -> None:
        """One update by the gradients of `compute`.

        Args:
            lr: its learning rate.
            limits: beyond them, or for a loss or norm that is NaN, the update is left out.
        """

    @abstractmethod
    def result(self) -> StepResult:
        """The result of the last update, to be read once, before the next update. Waits for the device."""

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

    def inputs(self, batch: Batch) -> dict[str, Any]:
        """The model's arguments for a micro-batch."""
        if not self.proven:
            self._attending += int(((batch.labels != IGNORED) & (batch.positions > 0)).sum())
        arguments: dict[str, Any] = {"tokens": batch.tokens, "labels": batch.labels}
        if not self.across_documents:
            return {**arguments, "documents": batch.documents, "positions": batch.positions,
                    "document_lengths": [length for row in batch.lengths for length in row]}
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
        self.queues = grid.ranks.device.type == "cuda"
        self.clip_norm = config.train.clip_norm
        self.keep_weights = config.parallel.reshard == "never"
        self.reduce_last = config.parallel.reduce == "last"
        # While FSDP2 computes with all-gathered weights, `named_parameters` returns those, so keep the shards here.
        self.weights = dict(model.named_parameters())
        self.parts = {name: grid.part(weight) for name, weight in self.weights.items()}

    def compute(self, micro_batches: Iterator[Batch], count: int, targets: Tensor) -> None:
        """See Engine."""
        self.model.train()
        total = self.accumulate(micro_batches, count, targets)
        self.sums = self._sum(torch.stack([total / targets, self._squared_norm()]))

    def update(self, lr: float, limits: StepLimits) -> None:
        """See Engine."""
        loss, norm = self.sums[0], self.sums[1].sqrt()
        # The device decides, so the host does not wait, and the optimizer skips the update by itself.
        applied = limits.allow(loss, norm)
        if not self.proven:
            self.prove_gradients(float(loss), self.grid.ranks.device)
        self.before_update()
        self.optimizer.step(lr, (norm / self.clip_norm).clamp(min=1.0), applied)
        self.model.zero_grad(set_to_none=True)
        self.transfer = Transfer(torch.stack([loss, norm, applied.double()]))

    def result(self) -> StepResult:
        """See Engine."""
        loss, norm, applied = self.transfer.read()
        self.updates += bool(applied)
        return StepResult(loss, norm, bool(applied))

    def accumulate(self, micro_batches: Iterator[Batch], count: int, targets: Tensor) -> Tensor:
        """Forward and backward over all micro-batches; this rank's sum of nats, float64."""
        device = self.grid.ranks.device
        total = torch.zeros((), dtype=torch.float64, device=device)
        for index, batch in enumerate(micro_batches):
            last = index == count - 1
            if self.sharded:
                self.model.set_is_last_backward(last)
                self.model.set_reshard_after_backward(last or not self.keep_weights)
                self.model.set_requires_gradient_sync(last or not self.reduce_last)
                self.model.set_requires_all_reduce(last)  # all-reduce replicas once a step, not once a micro-batch
            loss = self.loss(self.model, batch.to(device))
            (loss / targets.to(loss.dtype)).backward()
            total += loss.detach()
        return total

    def _squared_norm(self) -> Tensor:
        """This rank's addend to the squared norm of the whole gradient. One of the ranks that hold a part adds it."""
        gradients = [gradient for name, gradient in self._gradients() if self.parts[name].copy == 0]
        if not gradients:
            return torch.zeros((), dtype=torch.float64, device=self.grid.ranks.device)
        return torch.stack(torch._foreach_norm(gradients)).double().square().sum()

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
        self.model.zero_grad(set_to_none=True)  # a rollback may come between `compute` and `update`
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


class PipelineEngine(FsdpEngine):
    """Stages that `drover.pipeline.parallel.fsdp.parallelize` has placed, and an optimizer of this rank's parts of
    them."""

    model: PipelinedModel

    def __init__(self, model: PipelinedModel, optimizer: Optimizer, grid: Grid, config: Config) -> None:
        super().__init__(model, optimizer, grid, config)
        self.schedule: Any = None
        self.count = 0
        self.shape = (0, 0)
        self.losses: list[Tensor] = []
        if model.config.tied_embeddings and TIED in self.parts:  # the last stage's is a replica
            part = self.parts[TIED]
            last = grid.pipeline_rank == grid.pipeline - 1
            self.parts[TIED] = dataclasses.replace(part, copy=part.copy + part.copies * last, copies=2 * part.copies)

    def accumulate(self, micro_batches: Iterator[Batch], count: int, targets: Tensor) -> Tensor:
        """See FsdpEngine. The tokens of all micro-batches of the step are in memory."""
        device = self.grid.ranks.device
        batches = [batch.to(device) for batch in micro_batches]
        rows, length = batches[0].tokens.shape
        if self.schedule is None or (count, (rows, length)) != (self.count, self.shape):  # a new phase
            self.count = count
            self.shape = (rows, length)
            self.schedule = make_schedule(self.model, count, self.shape, self._share)
        inputs = [self.inputs(batch) for batch in batches]
        for stage in self.model.stages:
            stage.inputs = iter(inputs)
        self.targets = targets
        self.losses = []
        numbers = torch.arange(count, device="cpu")  # torch infers the count of micro-batches from it
        first = [numbers] if self.grid.pipeline_rank == 0 else []
        self.schedule.step(*first, target=numbers, return_outputs=False)
        for stage in self.model.stages:
            stage.inputs = None
        self._meet_ends()
        total = torch.zeros((), dtype=torch.float64, device=device)
        for loss in self.losses:
            total += loss
        self.losses = []
        return total

    def _share(self, loss: Tensor, number: Tensor) -> Tensor:
        """A micro-batch's part of the step's mean loss, for the backward pass. Called on ranks of the last stage."""
        self.losses.append(loss.detach())
        return loss / self.targets.to(loss.dtype)

    def _meet_ends(self) -> None:
        """Sum the two gradients of a tied embedding: the first stage's as embedding, and the last stage's as output.
        Each sends its own to the other; the sum of two is the same in either order."""
        if not self.model.config.tied_embeddings or TIED not in self.parts:
            return
        gradient = dict(self._gradients()).get(TIED)
        assert gradient is not None, "FSDP2 gives every part a gradient"
        theirs = torch.empty_like(gradient)
        group = self.model.group
        other = self.grid.pipeline - 1 if self.grid.pipeline_rank == 0 else 0
        swap = [dist.P2POp(dist.isend, gradient, group=group, group_peer=other),
                dist.P2POp(dist.irecv, theirs, group=group, group_peer=other)]
        for work in dist.batch_isend_irecv(swap):
            work.wait()
        gradient += theirs
