"""The engine for pipeline parallelism: FSDP2's over this rank's stages, whose passes follow a schedule."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from drover.pipeline.config.tree import Config
from drover.pipeline.data.sampling.batch import Batch
from drover.pipeline.parallel.grid import Grid
from drover.pipeline.parallel.pipeline_parallel import PipelinedModel, make_schedule
from drover.pipeline.training.engines.fsdp import FsdpEngine
from drover.pipeline.training.optimizers.base import Optimizer

TIED = "tok_embeddings.weight"
"""The parameter that the first and the last stage both hold if embeddings are tied."""


class PipelineEngine(FsdpEngine):
    """Stages that `drover.pipeline.parallel.fsdp.parallelize` has placed, and an optimizer of this rank's parts of
    them."""

    model: PipelinedModel

    def __init__(self, model: PipelinedModel, optimizer: Optimizer, grid: Grid, config: Config) -> None:
        super().__init__(model, optimizer, grid, config)
        self.schedule: Any = None
        self.count = 0
        self.targets = 0
        self.shape = (0, 0)
        self.losses: list[Tensor] = []
        if model.config.tied_embeddings and TIED in self.parts:  # the last stage's is a replica
            part = self.parts[TIED]
            last = grid.pipeline_rank == grid.pipeline - 1
            self.parts[TIED] = dataclasses.replace(part, copy=part.copy + part.copies * last, copies=2 * part.copies)

    def accumulate(self, micro_batches: Iterator[Batch], count: int, targets: int) -> Tensor:
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

    def trial(self, batch: Batch, targets: int) -> None:
        """See Engine. It uses the whole batch, since a schedule needs all micro-batches of a step."""
        self.accumulate(batch.split(len(batch.lengths) // self.count), self.count, targets)

    def _share(self, loss: Tensor, number: Tensor) -> Tensor:
        """A micro-batch's part of the step's mean loss, for the backward pass. Called on ranks of the last stage."""
        self.losses.append(loss.detach())
        return loss / self.targets

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
