"""Requests to stop: a signal sets a flag, the loop reads it once a step, on all ranks alike."""

from __future__ import annotations

import signal
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)


class StopRequest:
    """Catches the signals that ask a training run to save and leave (Ctrl-C, the elastic agent, Slurm)."""

    def __init__(self) -> None:
        self.reason: str | None = None

    def __enter__(self) -> StopRequest:
        self._before = {number: signal.signal(number, self._note) for number in SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        # Nothing else here: a collective in a signal handler would hang, since ranks are at different places.
        self.reason = signal.Signals(number).name
