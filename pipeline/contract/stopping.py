"""Requests to stop a stage that is done in units: a time limit lets units end, a person's request does not."""

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
"""That a time limit is near: going on at once, in another job, makes sense."""
SIGNALS = (signal.SIGTERM, *WARNINGS)
"""Ctrl-C is Python's own."""
GRACE = 0.6
"""Of the time from the warning to the limit, what units that run may take to end."""


class Stopped(BaseException):  # no error, and not to be taken for one by who catches those
    """The stage leaves its body.

    reason: in words. again: whether going on at once makes sense. units: how many of the phase are done.
    hopeless: time after time not one of any phase is finished. idle: so many starts in a row have finished none.
    """

    def __init__(self, reason: str, again: bool, units: int | None = None, hopeless: bool = False,
                 idle: int = 0) -> None:
        super().__init__(reason)
        self.reason, self.again, self.units, self.hopeless, self.idle = reason, again, units, hopeless, idle


class StopRequest:
    """What this process was asked, between `__enter__` and `__exit__`.

    Args:
        warned_s: seconds from the warning to the time limit.
        signals: that are heard besides SIGNALS.
        waits: whether the process looks at `heard` by itself, and is never taken out of its work.
    """

    def __init__(self, warned_s: float = 120.0, signals: tuple[signal.Signals, ...] = (), waits: bool = False) -> None:
        self._grace = GRACE * warned_s
        self._signals = (*SIGNALS, *signals)
        self._asked: set[str] = set()
        self._before: dict[signal.Signals, Any] = {}
        self._until = math.inf
        self._waits, self._works = waits, False

    def __enter__(self) -> StopRequest:
        here = threading.current_thread() is threading.main_thread()  # only there can signals be heard
        self._before = {number: signal.signal(number, self._note) for number in self._signals} if here else {}
        if here:
            self._before[signal.SIGALRM] = signal.signal(signal.SIGALRM, self._end)
            self._mask = signal.pthread_sigmask(signal.SIG_UNBLOCK, self._signals)
        return self

    def __exit__(self, *_: object) -> None:
        if self._before:
            # Where a launcher had them blocked, until there was somebody to hear them, they stay so from here on.
            signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @property
    def heard(self) -> bool:
        """Whether no other unit is to be begun."""
        return bool(self._asked)

    @property
    def over(self) -> bool:
        """Whether units that run are not to be waited for any more."""
        return time.monotonic() >= self._until

    @property
    def reason(self) -> str:
        """What was asked, in words."""
        return " and ".join(sorted(self._asked))

    @property
    def again(self) -> bool:
        """Whether only a time limit is the reason."""
        return not self._asked - {number.name for number in WARNINGS}

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Others do the units meanwhile, and who waits for them looks at `heard` and `over`."""
        self._waits = True
        try:
            yield
        finally:
            self._waits = False

    @contextmanager
    def working(self) -> Iterator[None]:
        """A unit is done here meanwhile, and left where it is once the request is `over`."""
        self._works = True
        try:
            yield
        finally:
            self._works = False
            if self._before:
                signal.setitimer(signal.ITIMER_REAL, 0)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._asked.add(signal.Signals(number).name)
        wait_s = self._grace if number in WARNINGS else 0.0
        self._until = min(self._until, time.monotonic() + wait_s)
        if not wait_s:
            self._end(number, frame)
        elif self._works:
            signal.setitimer(signal.ITIMER_REAL, wait_s)

    def _end(self, number: int, frame: FrameType | None) -> None:
        if not self._waits:
            raise Stopped(self.reason, self.again)
