"""The data of each training step: this rank's part of its batch, from the run's token shards, prefetched."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from drover.pipeline.config.batch import BatchPlan
from drover.pipeline.config.phases import PhasePlan
from drover.pipeline.contract.stage_work import Work
from drover.pipeline.core.console import Say, say
from drover.pipeline.core.errors import UserError
from drover.pipeline.core.files import Record
from drover.pipeline.data.exclusion import Excluded
from drover.pipeline.data.sampling.batch import Batch
from drover.pipeline.data.sampling.loader import Prefetcher
from drover.pipeline.data.sampling.packing import make
from drover.pipeline.data.shard_table import ShardTable
from drover.pipeline.data.stored.copying import survey
from drover.pipeline.data.stored.figures import told
from drover.pipeline.data.stored.opening import GB, reading, used
from drover.pipeline.data.stored.read_ahead import ReadAhead
from drover.pipeline.data.stored.shards import StoredTokens
from drover.pipeline.parallel.context_parallel import part_of
from drover.pipeline.parallel.grid import Grid
from drover.pipeline.parallel.ranks import Ranks
from drover.pipeline.records.checkpoints import TrainingProgress
from drover.pipeline.training.data.opening import open_training_data, read_shard_table, refuse_cut_shards


class StepBatches:
    """Opened on all ranks alike.

    Args:
        plan: the run's phases.
        of_phase: each phase's batch and its division among the ranks.
        say: prints messages for the user, on rank 0.

    Attributes:
        table: the token shards.
        opener: opens shards in an object store; None for files.
        data: the order of samples.

    Raises:
        UserError: a shard is missing or shorter, or cannot be packed; the same on every rank.
    """

    def __init__(self, work: Work, grid: Grid, plan: PhasePlan, of_phase: Sequence[BatchPlan],
                 say: Say) -> None:
        self.config, self.grid, self.plan, self._of_phase = work.config, grid, plan, of_phase
        self.ranks, self.url, self.say = grid.ranks, work.config.train.tokens_from, say
        # Rank 0 reads the table, whose size grows with the shards, and broadcasts it. One rank checks each shard.
        self.table = self.ranks.by_leader(lambda: read_shard_table(work))
        self.opener: StoredTokens | None = None
        if self.url is None:
            refuse_cut_shards(work.input("encode")[0], self.table, self.ranks)
        else:
            self.opener = open_store(work, self.table, self.ranks, self.url)
        self.data = open_training_data(work, self.table, self.opener, lambda planning: make(planning, self.ranks, say))
        self._ahead: ReadAhead | None = None

    def begin(self, progress: TrainingProgress, excluded: Excluded) -> None:
        """Read the steps after `progress`, without the excluded samples: at the start, and after a rollback."""
        self._began, self._excluded = progress, excluded
        steps = range(progress.step, self.config.train.steps)
        if self.opener is not None:
            self._stop_ahead()
            longest = max(batch.sequence_length for batch in self._of_phase)
            self._ahead = ReadAhead(self.opener, self.data, self._numbers, steps, longest)
        self._loader = Prefetcher(self._make, steps, self.config.train.loader_threads)

    def next(self) -> Batch:
        """The next step's batch."""
        return self._loader.next()

    @property
    def waited_s(self) -> float:
        """Seconds that the last step waited for its batch."""
        return self._loader.waited_s

    def fields(self, tokens: int, padding: int) -> Record:
        """Fields of a step's line about its batch of `tokens` tokens, and about this rank's reading so far."""
        found = {"padding_share": round(padding / tokens, 6)} if self.data.packings else {}
        if self.opener is not None:
            found |= {f"store_{name}": round(value, 4) for name, value in self.opener.figures.values().items()}
        return found

    def finish(self) -> Record:
        """Statistics of reading from the store, summed over ranks, for the final event. Called on all ranks alike."""
        if self.opener is None:
            return {}
        mine = self.opener.figures.values()
        sums = dict(zip(mine, self.ranks.sum(*mine.values()), strict=True))
        self.say(f"from {self.url}: {told(sums)}")
        return {"store": {name: round(value, 3) for name, value in sums.items()}}

    def pause(self) -> None:
        """Stop prefetching until `begin`."""
        self._loader.close()

    def close(self) -> None:
        """Stop reading."""
        if self.opener is not None:
            self.opener.close()
            self._stop_ahead()
        self._loader.close()

    def _stop_ahead(self) -> None:
        if self._ahead is not None:
            self._ahead.close()

    def _numbers(self, done: int) -> NDArray[np.int64]:
        """This rank's samples of the batch after `done` steps."""
        batch = self._of_phase[self.plan.phase_of(done + 1).number]
        ahead = self.plan.sequences_between(self._began.step, done) + batch.first(self.grid.data_rank)
        return self._excluded.numbers(self._began.samples, ahead, batch.rank_sequences)

    def _make(self, done: int) -> Batch:
        if self._ahead is not None:
            self._ahead.reached(done)
        batch = self.data.batch_of(self._numbers(done))
        if self.grid.context == 1:
            return batch
        return part_of(batch, self.grid.context, self.grid.context_rank, self.config.train.across_documents)


def open_store(work: Work, table: ShardTable, ranks: Ranks, url: str) -> StoredTokens:
    """A rank's reader of the shards in a store (`train.tokens_from`). Called on all ranks alike. Rank 0 checks that it
    holds the encode stage's shards.

    Raises:
        UserError: it does not, or it cannot be reached, or a node has no space for its cache; the same on every rank.
    """
    etags = ranks.by_leader(lambda: survey(url, table))
    settings = reading(work.config, table, url)
    tokens = StoredTokens(settings, table, etags,
                          lambda text: say("train", text if ranks.leads else f"rank {ranks.rank}: {text}"))
    problem, how = "", "read in parts, which cannot be verified by hashes"
    if settings.whole:
        try:
            how = f"fetched whole into at most {work.config.train.cache.gb:,g} GB of {tokens.cache.folder}"
        except UserError as error:
            problem = str(error)
    elif work.config.train.cache.read == "auto":
        how += ", as they are more than train.cache.gb"
    if found := dict.fromkeys(problem for problem in ranks.gather(problem) if problem):
        raise UserError("\n".join(found))
    if ranks.leads:
        size = int(used(work.config, table).sum())
        say("train", f"token shards from {url} ({size / GB:,.3f} GB), {how}")
    return tokens
