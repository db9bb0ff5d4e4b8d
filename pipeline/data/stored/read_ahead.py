"""Shards are fetched before they are needed: which samples come is known for the whole run, and so which shards."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from numpy.typing import NDArray

from drover.pipeline.core.errors import UserError
from drover.pipeline.data.sampling.loader import TrainingData
from drover.pipeline.data.stored.node_cache import Closed
from drover.pipeline.data.stored.shards import StoredTokens

FETCHES = 4
"""Shards that a rank fetches at once."""
SAMPLES = 4096
"""A rank's coming samples whose shards are fetched."""


class ReadAhead:
    """Fetches the whole shards of one rank's coming samples, in threads of its own.

    Args:
        numbers: sample numbers of this rank's part of the batch after so many steps.
        steps: those to come.
    """

    def __init__(self, tokens: StoredTokens, data: TrainingData, numbers: Callable[[int], NDArray[np.int64]],
                 steps: range) -> None:
        self._tokens, self._data, self._numbers, self._steps = tokens, data, numbers, steps
        self._next, self._closed, self._lock = steps.start, False, threading.Lock()
        self._pool = ThreadPoolExecutor(FETCHES, "read-ahead")
        self.reached(steps.start)

    def reached(self, step: int) -> None:
        """The loader makes the batch after so many steps now: fetch for those that come near enough."""
        ahead = max(1, SAMPLES // max(1, len(self._numbers(step))))  # phases may have larger batches
        with self._lock:
            while self._next < min(step + ahead + 1, self._steps.stop) and not self._closed:
                self._pool.submit(self._fetch, self._next)
                self._next += 1
        self._tokens.let_go()

    def close(self) -> None:
        """Fetch no further; what is being fetched is left to its end."""
        self._closed = True
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _fetch(self, step: int) -> None:
        try:
            for row in self._data.shard_rows(self._numbers(step)).tolist():
                if not self._closed:
                    self._tokens.descriptor(row, ahead=True)
        except (Closed, UserError):  # whoever needs it meets it again, and raises it
            pass
        except OSError as error:
            if not self._closed:
                self._closed = True
                self._tokens.say(f"token shards are not read ahead any more, only when they are needed: {error}")
