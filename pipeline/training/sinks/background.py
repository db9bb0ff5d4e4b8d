"""A sink at arm's length: in a thread of its own, behind a queue: neither its errors nor its pace are training's.

The step loop only puts what is to be told into the queue. A sink that raises, or that falls so far behind that the
queue is full, is switched off; one that hangs is left behind when training ends.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from queue import Full, Queue
from threading import Thread
from typing import Any

from pipeline.training.sinks.base import Sink

MOST_WAITING = 10_000
"""Calls that a sink may be behind."""
LONGEST = 500
"""Characters of an error that are told."""
LEAST_SECRET = 6
"""Characters of a value of the environment from which on it is told from ordinary words."""
_SECRET = re.compile(r"KEY|TOKEN|PASSWORD|PASSWD|SECRET|CREDENTIAL", re.IGNORECASE)
_CREDENTIALS_IN_ADDRESS = re.compile(r"(://)[^\s/@]+@")


class BackgroundSink:
    """One sink and its thread.

    Attributes:
        name: what it is called.
        failure: why it was switched off; empty as long as it is not.
    """

    def __init__(self, name: str, opened: Callable[[], Sink], most_waiting: int = MOST_WAITING) -> None:
        self.name, self.failure = name, ""
        self._opened = opened
        self._calls: Queue[tuple[str, tuple[Any, ...]]] = Queue(most_waiting)
        self._thread = Thread(target=self._run, name=f"sink-{name}", daemon=True)
        self._thread.start()

    def tell(self, method: str, *arguments: Any) -> None:
        """Have a method of the sink called, some time; at once nothing happens, and nothing is raised."""
        if self.failure:
            return
        try:
            self._calls.put_nowait((method, arguments))
        except Full:
            self._fail(f"it is {self._calls.maxsize:,} calls behind")

    def close(self, until: float) -> None:
        """Close the sink when all is told, and wait for that until `time.monotonic()` is `until`."""
        self.tell("close")
        self._thread.join(max(0.0, until - time.monotonic()) if not self.failure else 0.0)
        if self._thread.is_alive() and not self.failure:
            self._fail("it had not taken in everything when training ended")

    def _run(self) -> None:
        sink = None
        try:
            sink = self._opened()
            method = ""
            while method != "close" and not self.failure:
                method, arguments = self._calls.get()
                if not self.failure:
                    getattr(sink, method)(*arguments)
        except BaseException as error:  # noqa: BLE001 - a library may even ask to exit: training goes on all the same
            self._fail(without_secrets(f"{type(error).__name__}: {error}", os.environ))
        if self.failure and sink is not None:
            with suppress(BaseException):
                sink.close()

    def _fail(self, reason: str) -> None:
        self.failure = self.failure or reason or "it failed"


def without_secrets(text: str, environment: Mapping[str, str]) -> str:
    """An error's text as it may be logged: without values of the environment that are secret by their names, and
    without users and passwords in addresses; on one line, and not too long."""
    for name, value in environment.items():
        if len(value) >= LEAST_SECRET and _SECRET.search(name):
            text = text.replace(value, f"<{name}>")
    return " ".join(_CREDENTIALS_IN_ADDRESS.sub(r"\1<...>@", text).split())[:LONGEST]
