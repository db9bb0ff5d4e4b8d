"""How ranks are named in sentences."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby


def spelled(ranks: Sequence[int]) -> str:
    """Ascending numbers in short: 0-2, 5."""
    found = []
    for _, group in groupby(enumerate(ranks), key=lambda pair: pair[1] - pair[0]):
        run = [number for _, number in group]
        found.append(f"{run[0]}" if len(run) == 1 else f"{run[0]}-{run[-1]}")
    return ", ".join(found)
