"""Requests to stop: signals, a file and a time limit set flags; the loop sums them once a step, over all ranks."""

from __future__ import annotations

import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from drover.pipeline.contract.state import STOP
from drover.pipeline.contract.stopping import StopRequest
from drover.pipeline.parallel.ranks import Ranks
from drover.pipeline.training.hooks import Hook

if TYPE_CHECKING:
    from drover.pipeline.training.loop import Loop

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


class StopAgreement(StopRequest, Hook):
    """What this rank was asked, and what all ranks agree on. Rank 0 looks for the file and at the clock for all.

    Args:
        run_folder: where the file is looked for.
        minutes: after `began` (of time.monotonic) at which to stop; None: never.

    Attributes:
        stop: what was agreed on; None as long as nobody was asked.
    """

    def __init__(self, ranks: Ranks, run_folder: Path, minutes: float | None, began: float) -> None:
        super().__init__(signals=(signal.SIGINT,), waits=True)
        self.ranks, self._file, self._minutes = ranks, run_folder / STOP, minutes
        self._ends = None if minutes is None else began + 60 * minutes
        self._looked = -LOOK_EVERY_S
        self._words = str(STOP)
        self.stop: Stop | None = None

    def votes(self, loop: Loop | None = None) -> Sequence[float]:
        """This rank's causes, one of each, and who it is if it has any."""
        if self.ranks.leads:
            self._look()
        return [*(cause in self._asked for cause in CAUSES), self.heard, self.ranks.rank * self.heard]

    def on_votes(self, loop: Loop | None, sums: Sequence[float]) -> None:
        """What the sums mean; the text of the file is known to rank 0 alone."""
        *counts, asked, number = map(round, sums)
        found = {cause: count for cause, count in zip(CAUSES, counts, strict=True) if count}
        rank = number if asked == 1 else None
        self.stop = Stop(" and ".join(self._spelled(cause, count, rank) for cause, count in found.items()),
                         all(CAUSES[cause] for cause in found)) if found else None

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
