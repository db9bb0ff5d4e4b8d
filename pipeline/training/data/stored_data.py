"""Token shards that training reads from an object store (`train.tokens_from`)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
from numpy.typing import NDArray

from drover.pipeline.config.tree import Config
from drover.pipeline.contract.stage_work import Work
from drover.pipeline.core.console import say
from drover.pipeline.core.errors import UserError
from drover.pipeline.data.sampling.loader import TrainingData
from drover.pipeline.data.shard_table import ShardTable
from drover.pipeline.data.stored.copying import digest_of, survey
from drover.pipeline.data.stored.figures import NAMES, told
from drover.pipeline.data.stored.opening import GB, reading, used
from drover.pipeline.data.stored.read_ahead import ReadAhead
from drover.pipeline.data.stored.shards import Settings, StoredTokens
from drover.pipeline.parallel.ranks import Ranks

REQUESTS = 16
"""Parts of shards that a rank asks for at once."""


class StoredData:
    """One rank's reading of token shards from a store. Every method but `begin` and `reached` is called on all ranks
    alike."""

    def __init__(self, work: Work, table: ShardTable, ranks: Ranks, url: str) -> None:
        """See that the store has what the encode stage made: one rank looks.

        Raises:
            UserError: it has not, or cannot be reached; the same on every rank. Or this node's cache has no place.
        """
        self.ranks, self.url = ranks, url
        etags = ranks.by_leader(lambda: survey(url, table, digest_of(table)))
        settings = reading(work.config, table, url)
        self.tokens = StoredTokens(settings, table, etags, partial(_say, ranks.rank))
        self._ahead: ReadAhead | None = None
        if found := [problem for problem in ranks.gather(self._cache_problem()) if problem]:
            raise UserError("\n".join(dict.fromkeys(found)))
        if ranks.leads:
            say("train", self._told(settings, work.config, int(used(work.config, table).sum())))

    def begin(self, data: TrainingData, numbers: Callable[[int], NDArray[np.int64]], steps: range) -> None:
        """Fetch whole shards ahead for these steps; `numbers` gives this rank's samples after so many."""
        self._stop()
        if self.tokens.settings.whole:
            self._ahead = ReadAhead(self.tokens, data, numbers, steps)

    @property
    def loaders(self) -> int:
        """Threads that should make batches at one time: of parts of shards, each asks for one at a time."""
        return 1 if self.tokens.settings.whole else REQUESTS

    def reached(self, step: int) -> None:
        """The batch after so many steps is made now."""
        if self._ahead is not None:
            self._ahead.reached(step)

    def figures(self) -> dict[str, float]:
        """What this rank's reading took so far, for the log."""
        found = self.tokens.figures.values()
        return {f"store_{name}": round(value, 4) for name, value in found.items()}

    def finish(self) -> dict[str, float]:
        """Say what reading took on all ranks; the figures."""
        mine = self.tokens.figures.values()
        sums = dict(zip(NAMES, self.ranks.sum(*(mine[name] for name in NAMES)), strict=True))
        if self.ranks.leads:
            say("train", f"from {self.url}: {told(sums)}")
        return {name: round(value, 3) for name, value in sums.items()}

    def close(self) -> None:
        """Read nothing more."""
        self.tokens.close()
        self._stop()

    def _cache_problem(self) -> str:
        """Why this node cannot keep shards, as a sentence; "" if it can or need not."""
        try:
            if self.tokens.settings.whole:
                _ = self.tokens.cache
        except UserError as error:
            return str(error)
        return ""

    def _stop(self) -> None:
        if self._ahead is not None:
            self._ahead.close()
            self._ahead = None

    def _told(self, settings: Settings, config: Config, size: int) -> str:
        bound = f"{config.train.cache.gb:,g} GB of {self.tokens.cache.folder}" if settings.whole else ""
        how = f"fetched whole into at most {bound}" if settings.whole else \
            "read in parts, of which no hash tells that they are right, as they are more than train.cache.gb" \
            if config.train.cache.read == "auto" else "read in parts, of which no hash tells that they are right"
        return f"token shards from {self.url} ({size / GB:,.3f} GB), {how}"


def _say(rank: int, text: str) -> None:
    say("train", text if rank == 0 else f"rank {rank}: {text}")
