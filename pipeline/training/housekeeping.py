"""Small hooks: when to save, when to collect garbage, and the comparison of token shards."""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from drover.pipeline.training.data.token_check import TokenCheck
from drover.pipeline.training.hooks import Hook

if TYPE_CHECKING:
    from drover.pipeline.training.engines.engine import StepResult
    from drover.pipeline.training.loop import Loop

EVERY, ALL_EVERY = 50, 1000
"""Steps between two collections of what is new, as in torchtitan, and between two of all that came since the start:
what lived through one is not looked at by the quick ones."""


class Saving(Hook):
    """Asks for a save when enough minutes have passed, and stops all ranks where one could not save."""

    def __init__(self, every_minutes: float | None) -> None:
        self.every_minutes = every_minutes

    def votes(self, loop: Loop) -> Sequence[float]:
        """See Hook."""
        minutes = self.every_minutes
        late = loop.ranks.leads and minutes is not None and time.monotonic() - loop.saver.last_save > 60 * minutes
        return late, loop.saver.failed

    def on_votes(self, loop: Loop, sums: Sequence[float]) -> None:
        """See Hook."""
        late, failed = sums
        if failed:
            loop.saver.wait()  # raises, on every rank
        loop.save_asked |= bool(late)


class TokenChecking(Hook):
    """Compares the token shards that steps use, in background, and stops where one is damaged."""

    def __init__(self, tokens: TokenCheck) -> None:
        self.tokens = tokens

    def votes(self, loop: Loop) -> Sequence[float]:
        """See Hook."""
        self.tokens.use(loop.progress.step + 1,
                        loop.guards.excluded.take(loop.progress.samples, loop.batch.sequences).ranges)
        return self.tokens.votes()

    def on_votes(self, loop: Loop, sums: Sequence[float]) -> None:
        """See Hook."""
        damaged, checked = sums
        if damaged:
            loop.watchdog.pause()
        self.tokens.judge(damaged, checked, loop.settle_damaged)

    def on_step(self, loop: Loop, result: StepResult, record: dict[str, Any]) -> None:
        """See Hook."""
        record["shards_checked"] = self.tokens.checked

    def on_save(self, loop: Loop) -> None:
        """See Hook."""
        self.tokens.before_save(loop.progress, loop.settle_damaged, leaving=loop.stop.stop is not None)

    def on_end(self, loop: Loop) -> None:
        """See Hook."""
        self.tokens.close()


class Garbage(Hook):
    """Collects Python's cyclic garbage on all ranks after the same steps.

    Python collects it whenever enough objects were made. That happens on each rank in another step, and all other ranks
    wait for it there; of a thousand ranks, one is collecting in almost every step.
    """

    def on_start(self, loop: Loop) -> None:
        """From now on collect only after certain steps. What exists now is never looked at again."""
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
        """Let Python collect as it does by itself."""
        gc.enable()
        gc.unfreeze()
