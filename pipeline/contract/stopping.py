"""Requests to stop a stage with tasks. Before a time limit, running tasks may end; a person's request stops them."""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

WARNINGS = (signal.SIGUSR1, signal.SIGUSR2)
"""They warn that a time limit is near. Another job may continue at once."""
SIGNALS = (signal.SIGTERM, *WARNINGS)
"""Python itself handles Ctrl-C."""
GRACE = 0.6
"""The share of the time between warning and limit in which running tasks may end."""


class Stopped(BaseException):  # not an error: `except Exception` must not catch it
    """The stage leaves its body because of a request to stop.

    reason: in words. hopeless: whether so many starts in a row have finished no task that continuing is useless. facts:
    more of the stage's final status (`drover.pipeline.contract.state.StageState`).
    """

    def __init__(self, reason: str, hopeless: bool = False, **facts: Any) -> None:
        super().__init__(reason)
        self.reason = reason
        self.hopeless = hopeless
        self.facts = facts


class StopRequest:
    """The requests that this process receives between `__enter__` and `__exit__`.

    Args:
        warned_s: seconds from the warning to the time limit.
        signals: further signals that count as requests.
        waits: whether the process only reads `heard`. Then a request never raises `Stopped`.
    """

    def __init__(self, warned_s: float = 120.0, signals: tuple[signal.Signals, ...] = (), waits: bool = False) -> None:
        self._grace = GRACE * warned_s
        self._signals = (*SIGNALS, *signals)
        self._requests: set[str] = set()
        self._before: dict[signal.Signals, Any] = {}
        self._until = math.inf
        self._waits = waits
        self._works = False

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():  # only the main thread can handle signals
            self._before = {number: signal.signal(number, self._note) for number in self._signals}
            self._before[signal.SIGALRM] = signal.signal(signal.SIGALRM, self._end)
            self._mask = signal.pthread_sigmask(signal.SIG_UNBLOCK, self._signals)
        return self

    def __exit__(self, *_: object) -> None:
        if self._before:
            # A launcher may have blocked the signals until a handler was there. Then they are blocked again.
            signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @property
    def heard(self) -> bool:
        """Whether there was a request, so that no other task may start."""
        return bool(self._requests)

    @property
    def over(self) -> bool:
        """Whether to stop waiting for running tasks."""
        return time.monotonic() >= self._until

    @property
    def reason(self) -> str:
        """The names of the signals."""
        return " and ".join(sorted(self._requests))

    @property
    def again(self) -> bool:
        """Whether a time limit is the only reason, so that another job may continue at once."""
        return not self._requests - {number.name for number in WARNINGS}

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """A context in which other processes do the tasks. The caller polls `heard` and `over`; nothing is raised."""
        self._waits = True
        try:
            yield
        finally:
            self._waits = False

    @contextmanager
    def working(self) -> Iterator[None]:
        """A context in which this process does a task. `Stopped` interrupts the task once the request is `over`."""
        self._works = True
        try:
            yield
        finally:
            self._works = False
            if self._before:
                signal.setitimer(signal.ITIMER_REAL, 0)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._requests.add(signal.Signals(number).name)
        wait_s = self._grace if number in WARNINGS else 0.0
        self._until = min(self._until, time.monotonic() + wait_s)
        if not wait_s:
            self._end(number, frame)
        elif self._works:
            signal.setitimer(signal.ITIMER_REAL, wait_s)

    def _end(self, number: int, frame: FrameType | None) -> None:
        if not self._waits:
            raise Stopped(self.reason, again=self.again)
