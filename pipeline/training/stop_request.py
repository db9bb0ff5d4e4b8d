"""Requests to stop: signals, a file and a time limit set flags; the loop sums them once a step, over all ranks.

A launcher may start ranks with these signals blocked, so that one that comes while libraries are still being imported
waits until there is somebody to hear it: entering a `StopRequest` unblocks them.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from pipeline.contract.state import STOP
from pipeline.parallel.ranks import Ranks

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
CAUSES = {"SIGINT": False, "SIGTERM": False, "SIGUSR1": True, "SIGUSR2": True, "file": False, "time": True}
"""Why training may be stopped, and whether to go on with it at once makes sense: it does after a time limit, of which
a site warns by a user signal, not after a person's request. Where both kinds come together, the person's counts."""
LOOK_EVERY_S = 2.0
"""Seconds between two looks for the file: it may be on a busy network file system."""


@dataclass(frozen=True)
class Stop:
    """What all ranks agreed on: why, in words, and whether going on at once makes sense."""

    reason: str
    again: bool


class StopRequest:
    """What this rank was asked. Rank 0 looks for the file and at the clock for all.

    Args:
        run_folder: where the file is looked for.
        minutes: after `began` (of time.monotonic) at which to stop; None: never.
    """

    def __init__(self, ranks: Ranks, run_folder: Path, minutes: float | None, began: float) -> None:
        self.ranks, self._file, self._minutes = ranks, run_folder / STOP, minutes
        self._ends = None if minutes is None else began + 60 * minutes
        self._asked: set[str] = set()
        self._looked = -LOOK_EVERY_S
        self._words = str(STOP)

    def __enter__(self) -> StopRequest:
        self._before = {number: signal.signal(number, self._note) for number in SIGNALS}
        self._mask = signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        return self

    def __exit__(self, *_: object) -> None:
        # Where they came blocked they stay so from here on: the stage has said how it ended, and is not killed for it.
        signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @property
    def asked(self) -> bool:
        """Whether this rank has been."""
        return bool(self._asked)

    def votes(self) -> list[float]:
        """What this rank adds to the sum that all make: its causes, one of each, and who it is if it has any."""
        if self.ranks.leads:
            self._look()
        return [*(float(cause in self._asked) for cause in CAUSES), float(bool(self._asked)),
                float(self.ranks.rank if self._asked else 0)]

    def agreed(self, sums: Sequence[float]) -> Stop | None:
        """What the sums of all ranks' `votes` mean; the text of the file is known to rank 0 alone."""
        counts = {cause: round(count) for cause, count in zip(CAUSES, sums, strict=False) if count}
        if not counts:
            return None
        asked, number = map(round, sums[len(CAUSES):])
        return Stop(" and ".join(self._spelled(cause, count, number if asked == 1 else None)
                                 for cause, count in counts.items()), all(CAUSES[cause] for cause in counts))

    def _spelled(self, cause: str, count: int, rank: int | None) -> str:
        if cause == "file":
            return self._words
        if cause == "time":
            return f"train.stop_after_minutes={self._minutes:g}"
        if count == self.ranks.world:
            return cause
        return f"{cause} on {f'{count} of {self.ranks.world} ranks' if rank is None else f'rank {rank}'}"

    def _look(self) -> None:
        now = time.monotonic()
        if self._ends is not None and now >= self._ends:
            self._asked.add("time")
        if now - self._looked < LOOK_EVERY_S:
            return
        self._looked = now
        try:
            text = self._file.read_text(encoding="utf-8", errors="replace")
        except OSError:
            return
        self._words = " ".join(text.split()) or f"the file {STOP}"
        self._asked.add("file")

    def _note(self, number: int, frame: FrameType | None) -> None:
        # Nothing else here: a collective in a signal handler would hang, since ranks are at different places.
        self._asked.add(signal.Signals(number).name)
