"""A record of the sample texts that are being drawn, so that a start which they end is not followed by others.

Texts are drawn after the step's checkpoint, and again by the start that goes on from it. Were the drawing itself what
ends the process (memory, a hang), every start would end there.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from pipeline.files import read_json, write_json
from pipeline.parallel.ranks import Ranks

MOST_ENDED = 2
"""So many starts may end while they draw the texts of one step; the next one leaves the texts out. Not one: a node may
have been lost by chance."""
RECORD = "drawing.json"
"""In the train folder, only while texts are drawn."""


class SamplingAttempts:
    """The record. Every method is called on all ranks alike; rank 0 alone writes."""

    def __init__(self, folder: Path, ranks: Ranks) -> None:
        self.path, self.ranks = folder / RECORD, ranks

    def ended(self, step: int) -> int:
        """How many starts ended while they drew the texts after step number `step`; the same on every rank."""
        found: int = self.ranks.same(self._read(step) if self.ranks.leads else None)
        return found

    def begin(self, step: int, ended: int) -> None:
        """Texts are drawn from here on; before, `ended` starts ended while they drew them."""
        if self.ranks.leads:
            with suppress(OSError):  # training must not fail for it
                write_json(self.path, {"step": step, "starts": ended + 1})

    def end(self) -> None:
        """They are drawn."""
        if self.ranks.leads:
            with suppress(OSError):
                self.path.unlink(missing_ok=True)

    def _read(self, step: int) -> int:
        try:
            record = read_json(self.path)
            return int(record["starts"]) if record["step"] == step else 0
        except (OSError, ValueError, KeyError, TypeError):
            return 0
