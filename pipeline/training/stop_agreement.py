"""Requests to stop: signals, a file and a time limit set flags, which the loop all-reduces once a step."""

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
"""Causes of a stop, and whether the launcher should restart training at once: yes after a time limit, of which a site
warns by a user signal; no after a person's request. If both kinds come together, the person's request counts."""
LOOK_EVERY_S = 2.0
"""Seconds between two checks for the file: it may be on a busy network file system."""


@dataclass(frozen=True)
class Stop:
    """The ranks' decision to stop: the reason as text, and whether to restart at once."""

    reason: str
    again: bool


class StopAgreement(StopRequest, Hook):
    """This rank's requests to stop, and the decision of all ranks. Rank 0 checks the file and the clock for all.

    Args:
        run_folder: the folder of the file.
        minutes: stop this long after `began` (of time.monotonic); None: never.

    Attributes:
        stop: the decision; None while no rank has a request.
    """

    def __init__(self, ranks: Ranks, run_folder: Path, minutes: float | None, began: float) -> None:
        super().__init__(signals=(signal.SIGINT,), waits=True)
        self.ranks = ranks
        self._file = run_folder / STOP
        self._minutes = minutes
        self._ends = None if minutes is None else began + 60 * minutes
        self._looked = -LOOK_EVERY_S
        self._file_text = str(STOP)
        self.stop: Stop | None = None

    def votes(self, loop: Loop | None = None) -> Sequence[float]:
        """One flag for each cause, whether this rank got a signal, and if so its number."""
        if self.ranks.is_rank_zero:
            self._check_file_and_clock()
        return [*(cause in self._requests for cause in CAUSES), self.heard, self.ranks.rank * self.heard]

    def on_votes(self, loop: Loop | None, sums: Sequence[float]) -> None:
        """Decide by the sums. Only rank 0 knows the text of the file."""
        *counts, signalled, number = map(round, sums)
        result = {cause: count for cause, count in zip(CAUSES, counts, strict=True) if count}
        rank = number if signalled == 1 else None
        self.stop = Stop(" and ".join(self._describe(cause, count, rank) for cause, count in result.items()),
                         all(CAUSES[cause] for cause in result)) if result else None

    def _describe(self, cause: str, count: int, rank: int | None) -> str:
        if cause == "file":
            return self._file_text
        if cause == "time":
            return f"train.stop_after_minutes={self._minutes:g}"
        if count == self.ranks.world:
            return cause
        return f"{cause} on {f'{count} of {self.ranks.world} ranks' if rank is None else f'rank {rank}'}"

    def _check_file_and_clock(self) -> None:
        now = time.monotonic()
        if self._ends is not None and now >= self._ends:
            self._requests.add("time")
        if now - self._looked < LOOK_EVERY_S:
            return
        self._looked = now
        try:
            text = self._file.read_text(encoding="utf-8", errors="replace")
        except OSError:
            return
        self._file_text = " ".join(text.split()) or f"the file {STOP}"
        self._requests.add("file")
