"""Fetch shards before they are needed: the order of samples, and so of shards, is known for the whole run."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import numpy as np
from numpy.typing import NDArray

from drover.pipeline.core.background import BackgroundWorker
from drover.pipeline.core.errors import UserError
from drover.pipeline.data.sampling.loader import TrainingData
from drover.pipeline.data.stored.node_cache import Closed
from drover.pipeline.data.stored.shards import MEMORY_BYTES, StoredTokens

FETCHES = 4
"""Shards that a rank fetches at once."""
REQUESTS = 16
"""Parts of shards that a rank requests at once."""
SAMPLES = 4096
"""A rank's coming samples whose shards are fetched."""
PART_BYTES = 16384
"""Most memory that finding the documents of a window takes, without its tokens."""


class ReadAhead:
    """Threads of one rank that go before its loader.

    Args:
        numbers: sample numbers of this rank's part of the batch after so many steps.
        steps: those to come.
        length: tokens of a sample, at most.
    """

    def __init__(self, tokens: StoredTokens, data: TrainingData, numbers: Callable[[int], NDArray[np.int64]],
                 steps: range, length: int) -> None:
        self._tokens, self._data, self._numbers, self._whole = tokens, data, numbers, tokens.settings.whole
        self._next, self._end, self._reached, self._closed = steps.start, steps.stop, steps.start, False
        self._most = SAMPLES if self._whole else min(SAMPLES, MEMORY_BYTES // 2 // (4 * (length + 1) + PART_BYTES))
        self._pool = ThreadPoolExecutor(FETCHES if self._whole else REQUESTS, "read-ahead")
        self._worker = BackgroundWorker[None]("read-ahead", self._read_on, newest_only=True)
        self._worker.put(None)

    def reached(self, step: int) -> None:
        """The loader makes the batch after so many steps now."""
        self._reached = max(self._reached, step)
        self._worker.put(None)
        self._tokens.let_go()

    def close(self) -> None:
        """Read no further; what is being read is left to its end."""
        self._closed = True
        self._worker.close(drop=True)
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _read_on(self, _: None) -> None:
        """Read steps as far as the loader is near enough."""
        while self._next < self._end and not self._closed:
            try:
                samples = self._numbers(self._next)  # phases may have larger batches
                if self._next > self._reached + max(1, self._most // max(1, len(samples))):
                    return
                if self._whole:
                    list(self._pool.map(self._fetch, self._data.shard_rows(samples).tolist()))
                else:
                    list(self._pool.map(self._parts, samples))
            except Closed:
                self._closed = True
            except UserError:  # whoever needs it meets it again, and raises it
                pass
            except Exception as error:  # noqa: BLE001 - a thread that dies in silence would only be slow
                self._closed = True
                why = f"{error}" if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
                self._tokens.say(f"token shards are not read ahead any more, only when they are needed: {why}")
            self._next += 1

    def _fetch(self, row: int) -> None:
        if not self._closed:
            with self._tokens.reading_ahead():
                self._tokens.descriptor(row)

    def _parts(self, sample: np.int64) -> None:
        """Read what a sample is made of; it stays in memory."""
        if not self._closed:
            with self._tokens.reading_ahead(), suppress(UserError):
                self._data.batch_of(np.array([sample]))
