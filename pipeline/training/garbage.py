"""Python's cyclic garbage, collected by all ranks after the same steps.

Python collects it whenever enough objects were made. That happens on each rank in another step, and all other ranks
wait for it there; of a thousand ranks, one is collecting in almost every step.
"""

from __future__ import annotations

import gc

EVERY = 50
"""Steps between two collections, as in torchtitan."""


def begin() -> None:
    """From now on collect only when `collect` says so. What exists now is never looked at again."""
    gc.collect()
    gc.freeze()
    gc.disable()


def collect(step: int) -> None:
    """Collect what the last steps made, after every `EVERY` steps."""
    if step % EVERY == 0:
        gc.collect(1)


def end() -> None:
    """Let Python collect as it does by itself."""
    gc.enable()
    gc.unfreeze()
