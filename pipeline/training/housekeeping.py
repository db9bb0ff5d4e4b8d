"""Small hooks: when to save, and when to collect garbage."""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from drover.pipeline.training.hooks import Hook

if TYPE_CHECKING:
    from drover.pipeline.training.loop import Loop

EVERY, ALL_EVERY = 50, 1000
"""Steps between two collections of young objects, as in torchtitan, and between two of all objects made since the
start. A young collection does not visit objects that survived an earlier one."""


class Saving(Hook):
    """Requests a checkpoint when enough minutes have passed, and stops all ranks if one of them could not save."""

    def __init__(self, every_minutes: float | None) -> None:
        self.every_minutes = every_minutes

    def votes(self, loop: Loop) -> Sequence[float]:
        """See Hook."""
        minutes = self.every_minutes
        since_save = time.monotonic() - loop.saver.last_save
        late = loop.ranks.is_rank_zero and minutes is not None and since_save > 60 * minutes
        return late, loop.saver.failed

    def on_votes(self, loop: Loop, sums: Sequence[float]) -> None:
        """See Hook."""
        late, failed = sums
        if failed:
            loop.saver.wait()  # raises, on every rank
        loop.save_requested |= bool(late)


class Garbage(Hook):
    """Collects Python's cyclic garbage on all ranks after the same steps.

    By itself Python collects whenever enough objects were made. Each rank would do so in a different step while all
    others wait: of a thousand ranks, one would be collecting in almost every step.
    """

    def on_start(self, loop: Loop) -> None:
        """From now on collect only after certain steps. Objects that exist now are never visited again."""
        gc.collect()
        gc.freeze()
        gc.disable()

    def after_step(self, loop: Loop) -> None:
        """Collect what the last steps made, after every `EVERY` steps."""
        if loop.progress.step % ALL_EVERY == 0:
            gc.collect()
        elif loop.progress.step % EVERY == 0:
            gc.collect(1)

    def on_end(self, loop: Loop) -> None:
        """Return to Python's own collection."""
        gc.enable()
        gc.unfreeze()
