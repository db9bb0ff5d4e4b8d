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
    """Threads of one rank that go before its loader, and fetch whole shards.

    Args:
        numbers: sample numbers of this rank's part of the batch after so many steps.
        steps: those to come.
    """

    def __init__(self, tokens: StoredTokens, data: TrainingData, numbers: Callable[[int], NDArray[np.int64]],
                 steps: range) -> None:
        self._tokens, self._data, self._numbers, self._steps = tokens, data, numbers, steps
        self._reached, self._closed, self._moved = steps.start, False, threading.Condition()
        self._pool = ThreadPoolExecutor(FETCHES, "read-ahead")
        self._thread = threading.Thread(target=self._run, name="read-ahead", daemon=True)
        self._thread.start()

    def reached(self, step: int) -> None:
        """The loader makes the batch after so many steps now."""
        with self._moved:
            self._reached = max(self._reached, step)
            self._moved.notify_all()
        self._tokens.let_go()

    def close(self) -> None:
        """Fetch no further; what is being fetched is left to its end."""
        with self._moved:
            self._closed = True
            self._moved.notify_all()
        self._thread.join()
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _run(self) -> None:
        for step in self._steps:
            samples = self._numbers(step)
            ahead = max(1, SAMPLES // max(1, len(samples)))  # in steps; phases may have larger batches
            with self._moved:
                self._moved.wait_for(lambda at=step - ahead: self._closed or at <= self._reached)  # type: ignore[misc]
            if self._closed:
                return
            try:
                list(self._pool.map(self._fetch, self._data.shard_rows(samples).tolist()))
            except Closed:
                return
            except UserError:  # whoever needs it meets it again, and raises it
                continue
            except OSError as error:
                self._tokens.say(f"token shards are not read ahead any more, only when they are needed: {error}")
                return

    def _fetch(self, row: int) -> None:
        if not self._closed:
            self._tokens.descriptor(row, ahead=True)
