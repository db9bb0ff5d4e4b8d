"""Fetch shards before they are needed: the order of samples, and so of shards, is known for the whole run."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import numpy as np
from numpy.typing import NDArray

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
        self._tokens, self._data, self._numbers, self._steps, self._length = tokens, data, numbers, steps, length
        self._reached, self._closed, self._moved = steps.start, False, threading.Condition()
        self._pool = ThreadPoolExecutor(FETCHES if tokens.settings.whole else REQUESTS, "read-ahead")
        self._thread = threading.Thread(target=self._run, name="read-ahead", daemon=True)
        self._thread.start()

    def reached(self, step: int) -> None:
        """The loader makes the batch after so many steps now."""
        with self._moved:
            self._reached = max(self._reached, step)
            self._moved.notify_all()
        self._tokens.let_go()

    def close(self) -> None:
        """Read no further; what is being read is left to its end."""
        with self._moved:
            self._closed = True
            self._moved.notify_all()
        self._thread.join()
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _run(self) -> None:
        for step in self._steps:
            if not self._may_go_to(step):
                return
            try:
                samples = self._numbers(step)
                if self._tokens.settings.whole:
                    list(self._pool.map(self._fetch, self._data.shard_rows(samples).tolist()))
                else:
                    list(self._pool.map(self._parts, samples))
            except Closed:
                return
            except UserError:  # whoever needs it meets it again, and raises it
                continue
            except OSError as error:
                self._tokens.say(f"token shards are not read ahead any more, only when they are needed: {error}")
                return

    def _may_go_to(self, step: int) -> bool:
        """Wait until the loader is near enough; False where reading ends."""
        samples = max(1, len(self._numbers(step)))  # phases may have larger batches
        most = SAMPLES if self._tokens.settings.whole else MEMORY_BYTES // 2 // (4 * (self._length + 1) + PART_BYTES)
        with self._moved:
            while not self._closed and step > self._reached + max(1, min(SAMPLES, most) // samples):
                self._moved.wait()
            return not self._closed

    def _fetch(self, row: int) -> None:
        if not self._closed:
            with self._tokens.reading_ahead():
                self._tokens.descriptor(row)

    def _parts(self, sample: np.int64) -> None:
        """Read what a sample is made of; it stays in memory."""
        if not self._closed:
            with self._tokens.reading_ahead(), suppress(UserError):
                self._data.batch_of(np.array([sample]))
