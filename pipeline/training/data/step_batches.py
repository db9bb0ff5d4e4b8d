"""The data of each training step: this rank's part of its batch, from the run's token shards, prefetched."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from drover.pipeline.config.batch import BatchPlan
from drover.pipeline.config.phases import PhasePlan
from drover.pipeline.contract.stage_work import Work
from drover.pipeline.core.console import Say
from drover.pipeline.data.exclusion import Excluded
from drover.pipeline.data.remote_tokens import shard_folder
from drover.pipeline.data.sampling.batch import Batch
from drover.pipeline.data.sampling.loader import Prefetcher
from drover.pipeline.data.sampling.packing import make
from drover.pipeline.parallel.context_parallel import part_of
from drover.pipeline.parallel.grid import Grid
from drover.pipeline.records.checkpoints import TrainingProgress
from drover.pipeline.training.data.opening import (
    download_once_per_node,
    open_training_data,
    read_shard_table,
    refuse_cut_shards,
)


class StepBatches:
    """Opened on all ranks alike.

    Args:
        plan: the run's phases.
        of_phase: each phase's batch and its division among the ranks.
        say: prints messages for the user, on rank 0.

    Attributes:
        table: the token shards. folder: with their files, on this node.
        data: the order of samples.

    Raises:
        UserError: a shard is missing or shorter, or cannot be downloaded or packed; the same on every rank.
    """

    def __init__(self, work: Work, grid: Grid, plan: PhasePlan, of_phase: Sequence[BatchPlan],
                 say: Say) -> None:
        self.config = work.config
        self.grid = grid
        self.plan = plan
        self._of_phase = of_phase
        # Rank 0 reads the table, whose size grows with the shards, and broadcasts it.
        self.table = grid.ranks.by_leader(lambda: read_shard_table(work))
        self.folder = shard_folder(work, self.table)
        download_once_per_node(work, self.table, range(len(self.table)), grid.ranks)
        if work.config.train.tokens_from is None:
            refuse_cut_shards(self.folder, self.table, grid.ranks)
        self.data = open_training_data(work, self.table, self.folder, lambda planning: make(planning, grid.ranks, say))

    def begin(self, progress: TrainingProgress, excluded: Excluded) -> None:
        """Read the steps after `progress`, without the excluded samples: at the start, and after a rollback."""
        self._began = progress
        self._excluded = excluded
        self._loader = Prefetcher(self._make, range(progress.step, self.config.train.steps),
                                  self.config.train.loader_threads)

    def next(self) -> Batch:
        """The next step's batch."""
        return self._loader.next()

    @property
    def waited_s(self) -> float:
        """Seconds that the last step waited for its batch."""
        return self._loader.waited_s

    def close(self) -> None:
        """Stop prefetching until `begin`."""
        self._loader.close()

    def _numbers(self, done: int) -> NDArray[np.int64]:
        """This rank's samples of the batch after `done` steps."""
        batch = self._of_phase[self.plan.phase_of(done + 1).number]
        ahead = self.plan.sequences_between(self._began.step, done) + batch.first(self.grid.data_rank)
        return self._excluded.numbers(self._began.samples, ahead, batch.rank_sequences)

    def _make(self, done: int) -> Batch:
        batch = self.data.batch_of(self._numbers(done))
        if self.grid.context == 1:
            return batch
        return part_of(batch, self.grid.context, self.grid.context_rank, self.config.train.across_documents)

