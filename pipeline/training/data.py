"""The training data: the token shards of a run, on this node's disk, checked, in the order of its settings, as batches
of its steps.

A shard is hashed in the background when a step first reads it, and compared with the encode stage's manifest. A
checkpoint appears only when all shards that were read before it are as encode recorded them, so none is made of damaged
tokens. If one is not, all ranks stop together, and training continues from the newest checkpoint.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence
from functools import partial
from itertools import starmap
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from drover.pipeline.config.phases import BatchPlan, PhasePlan
from drover.pipeline.config.training import TrainConfig
from drover.pipeline.contract.inputs import InputCheck
from drover.pipeline.contract.stage_work import Work
from drover.pipeline.core.background import BackgroundWorker
from drover.pipeline.core.console import Say
from drover.pipeline.core.errors import UserError, all_problems, listed
from drover.pipeline.data.exclusion import Excluded
from drover.pipeline.data.remote_tokens import download_shards, recorded_shards, shard_folder
from drover.pipeline.data.sampling.batch import Batch
from drover.pipeline.data.sampling.consumption import (
    excesses,
    many_epochs,
    plan_lines,
    planned_by,
    repetition,
)
from drover.pipeline.data.sampling.loader import Prefetcher, TrainingData
from drover.pipeline.data.sampling.packing import Planner, forget_plan, make_plan, read_plan
from drover.pipeline.data.token_shards import ShardTable, open_shards, size_problems
from drover.pipeline.records.checkpoints import TrainingProgress, complete_checkpoints, step_of
from drover.pipeline.training.hooks import Hook

if TYPE_CHECKING:
    from drover.pipeline.parallel.grid import Grid
    from drover.pipeline.parallel.ranks import Ranks
    from drover.pipeline.training.loop import Loop
    from drover.pipeline.training.recorder import Recorder

POLL_S = 5.0
"""Interval at which ranks that wait for a download learn whether it is done."""


def read_shard_table(work: Work) -> ShardTable:
    """The shards in the encode stage's manifest."""
    return ShardTable.of(work.input("encode")[1].outputs)


def open_training_data(work: Work, table: ShardTable, folder: Path, planner: Planner | None = None) -> TrainingData:
    """The training split of the encode stage, in the order of the configuration's sources.

    Args:
        table: its shards (`read_shard_table`). No shard is opened before it is used.
        folder: with the shards' files.
        planner: makes the plans of a packing, on all ranks alike. None: plans are read from their files; a missing one
            is made elsewhere, with a message on stderr. This is for tools, which print results on stdout.
    """
    train = work.config.train
    sources = work.config.source_names
    counts = work.input("encode")[1].counts
    packing = None if train.packing == "concatenate" else (
        work.folder / "packing", planner or (lambda packing: read_plan(packing, partial(print, file=sys.stderr))))
    return TrainingData(open_shards(table, "train", sources, folder), PhasePlan.of(train),
                        work.config.order_seed, table.content("train"), counts.get("vocab_size"), packing)


def refuse_beyond(train: TrainConfig, data: TrainingData, say: Say) -> dict[str, float]:
    """Log what the plan will consume, and warn of sources that it repeats many times. Returns the epochs of these.

    Raises:
        UserError: that is more than train.max_epochs allows.
    """
    consumption = planned_by(data.order)
    many = many_epochs(train, consumption.epochs)
    for text in plan_lines(train, consumption):
        say(text)
    for text in starmap(repetition, many.items()):
        say(f"warning: {text}")
    if beyond := excesses(train, consumption):
        raise UserError(listed(beyond))
    return many


def download_once_per_node(work: Work, table: ShardTable, rows: Iterable[int], ranks: Ranks) -> None:
    """With `train.tokens_from`, have one process of each node download the shards in these rows. Called on all ranks
    alike; UserError as of `download_shards`, the same on every rank."""
    if work.config.train.tokens_from is None:
        return
    worker = BackgroundWorker[Iterable[int]](
        "token-download", lambda wanted: download_shards(work, table, wanted, shows_progress=ranks.is_rank_zero))
    if os.environ.get("LOCAL_RANK", "0") == "0":
        worker.put(rows)
    # Many short collectives, since a download may take longer than a collective waits for other ranks.
    while ranks.sum(worker.close(POLL_S))[0] < ranks.world:
        pass

    def refuse_failed() -> None:
        if worker.error is not None:
            raise worker.error
    ranks.by_all(refuse_failed)


def refuse_cut_shards(folder: Path, table: ShardTable, ranks: Ranks) -> None:
    """Check that every shard exists and has its full length. Each shard is checked by one of the ranks.

    Raises:
        UserError: some are missing or shorter; the same on every rank.
    """
    parts = ranks.gather(size_problems(folder, table, range(ranks.rank, len(table), ranks.world)))
    if problems := [problem for part in parts for problem in part]:
        raise UserError(all_problems(problems, f"{len(problems):,} of {len(table):,} token shards are damaged"))


class StepBatches:
    """Opened on all ranks alike.

    Args:
        say: prints messages for the user, on rank 0.

    Attributes:
        plan: the run's phases. of_phase: each phase's batch and its division among the ranks.
        table: the token shards. folder: with their files, on this node.
        data: the order of samples.

    Raises:
        UserError: a shard is missing or shorter, or cannot be downloaded or packed; the same on every rank.
    """

    def __init__(self, work: Work, grid: Grid, say: Say) -> None:
        self.config = work.config
        self.grid = grid
        self.plan = PhasePlan.of(self.config.train)
        self.of_phase = [BatchPlan.of(phase.train, self.config.parallel, grid.ranks.world)
                         for phase in self.plan.phases]
        # Rank 0 reads the table, whose size grows with the shards, and broadcasts it.
        self.table = grid.ranks.by_leader(lambda: read_shard_table(work))
        self.folder = shard_folder(work, self.table)
        if work.config.train.tokens_from is None:
            refuse_cut_shards(self.folder, self.table, grid.ranks)
        else:
            download_once_per_node(work, self.table, range(len(self.table)), grid.ranks)  # compares what it fetches
        self.data = open_training_data(work, self.table, self.folder,
                                       lambda packing: make_plan(packing, grid.ranks, say))

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
        batch = self.of_phase[self.plan.phase_of(done + 1).number]
        ahead = self.plan.sequences_between(self._began.step, done) + batch.first(self.grid.data_rank)
        return self._excluded.numbers(self._began.samples, ahead, batch.rank_sequences)

    def _make(self, done: int) -> Batch:
        batch = self.data.batch_of(self._numbers(done))
        if self.grid.context == 1:
            return batch
        from drover.pipeline.parallel.context_parallel import part_of
        return part_of(batch, self.grid.context, self.grid.context_rank, self.config.train.across_documents)


DAMAGED = "token_shards_damaged"
"""The event: the steps after `step`, the newest checkpoint's, may have read damaged tokens and are repeated."""


class DamagedTokensError(UserError):
    """A token shard is not what encode recorded."""


class TokenCheck(Hook):
    """This rank's part of the comparison. Each shard is hashed by one rank; one that was downloaded to every node, by
    one rank of each node."""

    def __init__(self, work: Work, ranks: Ranks, nodes: Sequence[str], batches: StepBatches, recorder: Recorder
                 ) -> None:
        self.work = work
        self.ranks = ranks
        self.batches = batches
        self.recorder = recorder
        table = batches.table
        readers = [rank for rank, node in enumerate(nodes) if node == nodes[ranks.rank]]
        if work.config.train.tokens_from is None:
            readers = list(range(ranks.world))
        self._unread = np.zeros(len(table), bool)
        self._unread[readers.index(ranks.rank)::len(readers)] = True
        self._check = InputCheck([])
        self._closed = False
        self._compare(table.rows("validation"))

    def votes(self, loop: Loop) -> Sequence[float]:
        """Compare the shards that the next step is the first to read. Returns whether this rank found a damaged one."""
        if self._unread.any():
            samples = loop.guards.excluded.numbers(loop.next_step[1], 0, loop.batch.sequences)
            self._compare(loop.data.shard_rows(samples))
        return [bool(self._check.problem)]

    def on_votes(self, loop: Loop, sums: Sequence[float]) -> None:
        """DamagedTokensError, the same on every rank, if a shard is damaged."""
        if not any(sums):
            return
        loop.watchdog.pause()
        problems = [problem for problem in loop.ranks.gather(self._check.problem) if problem]
        self.close()
        loop.saver.settle()  # a save that waits for other shards ends without a checkpoint

        def refuse() -> None:
            raise self._error(problems)
        loop.ranks.by_leader(refuse)

    def refuse_damaged(self) -> None:
        """Wait until this rank's part of the shards read so far is compared. Called in the thread that saves, before a
        checkpoint appears. DamagedTokensError if one is damaged, or if the comparison was ended."""
        self._check.wait()
        if self._closed or self._check.problem:
            raise self._error([self._check.problem])

    def note_damage(self) -> None:
        """Log that steps will be repeated, and delete plans of packings that may be made of damage."""
        self.recorder.event(DAMAGED, step=max(map(step_of, self._checkpoints()), default=0))
        if self.ranks.is_rank_zero:
            for packing in self.batches.data.packings:
                forget_plan(packing)

    def close(self) -> None:
        """Stop comparing."""
        self._closed = True
        self._check.close()

    def _compare(self, rows: np.ndarray) -> None:
        new = rows[self._unread[rows]]
        self._unread[new] = False
        self._check.add(recorded_shards(self.work, self.batches.table, new.tolist()))

    def _error(self, problems: Iterable[str]) -> DamagedTokensError:
        saved = self._checkpoints()
        newest = f"The newest checkpoint is {saved[-1]}." if saved else "There is no checkpoint yet."
        return DamagedTokensError("\n".join([*filter(None, problems), newest]))

    def _checkpoints(self) -> list[Path]:
        return complete_checkpoints(self.work.folder)
