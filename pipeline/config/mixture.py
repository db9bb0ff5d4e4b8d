"""The smallest share that a source can have in a mixture, so that none is left out in silence."""

from __future__ import annotations

import math
from collections.abc import Mapping

SMALLEST_SHARE = 2.0**-17
"""Of all training sequences. The order of samples is a table of a period, which must hold several sequences of each
source: of this share 8 in a million."""


def mixture_problems(mixture: Mapping[str, float]) -> list[str]:
    """Shares, of 0 or more, that are too small to be sampled."""
    total = math.fsum(mixture.values())
    return [share_too_small(name, share / total) for name, share in mixture.items()
            if 0 < share / total < SMALLEST_SHARE]


def share_too_small(name: str, share: float) -> str:
    """What to say of a source whose share of the whole is below SMALLEST_SHARE."""
    return (f"train.mixture gives the source {name} {share:.3g} of the training sequences; the smallest share that is "
            f"sampled is {SMALLEST_SHARE:.3g} (1 in {round(1 / SMALLEST_SHARE):,}). Raise it, or write 0 to leave the "
            f"source out.")
