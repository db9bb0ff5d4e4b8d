"""Python's cyclic garbage, collected by all ranks after the same steps.

Python collects it whenever enough objects were made. That happens on each rank in another step, and all other ranks
wait for it there; of a thousand ranks, one is collecting in almost every step.
"""

from __future__ import annotations

import gc

EVERY, ALL_EVERY = 50, 1000
"""Steps between two collections of what is new, as in torchtitan, and between two of all that came since the start:
what lived through one is not looked at by the quick ones."""


def begin() -> None:
    """From now on collect only when `collect` says so. What exists now is never looked at again."""
    gc.collect()
    gc.freeze()
    gc.disable()


def collect(step: int) -> None:
    """Collect what the last steps made, after every `EVERY` steps."""
    if step % ALL_EVERY == 0:
        gc.collect()
    elif step % EVERY == 0:
        gc.collect(1)


def end() -> None:
    """Let Python collect as it does by itself."""
    gc.enable()
    gc.unfreeze()
