"""Weights of sources: how they are written, as numbers or tokens, and the smallest possible one, so that no source is
silently left out."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from decimal import Decimal
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

UNITS = {"": 1, "k": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
SMALLEST_SHARE = 2.0**-17
"""Smallest share of all training sequences. The order of samples repeats a table, in which each source needs several
sequences: this share gives 8 in a million."""


def mixture_problems(mixture: Mapping[str, float]) -> list[str]:
    """Shares of 0 or more that are too small to be sampled."""
    total = math.fsum(mixture.values())
    return [share_too_small(name, share / total) for name, share in mixture.items()
            if 0 < share / total < SMALLEST_SHARE]


def share_too_small(name: str, share: float) -> str:
    """The message for a source whose share is below SMALLEST_SHARE."""
    return (f"train.mixture gives the source {name} {share:.3g} of the training sequences; the smallest share that is "
            f"sampled is {SMALLEST_SHARE:.3g} (1 in {round(1 / SMALLEST_SHARE):,}). Raise it, or write 0 to leave the "
            f"source out.")


def read_tokens(value: Any) -> Any:
    """A number of tokens in any notation: 250M, 2.5k, 10B or 15T as text, or a whole number with a point or an
    exponent. Other values are returned unchanged, for pydantic to refuse."""
    if isinstance(value, str) and (match := re.fullmatch(r"\s*(\d+(?:_\d+)*(?:\.\d+)?)\s*([kKMBT]?)\s*", value)):
        number = Decimal(match[1].replace("_", "")) * UNITS[match[2].replace("K", "k")]
        return int(number) if number == int(number) and number < 2**63 else float(number)
    return int(value) if isinstance(value, float) and value.is_integer() and abs(value) < 2**63 else value


def _share(value: Any) -> Any:
    number = read_tokens(value)
    return float(number) if isinstance(number, int) and not isinstance(number, bool) else number


TokenCount = Annotated[int, BeforeValidator(read_tokens)]
"""Tokens: a whole number, or a text such as 250M."""
Mixture = dict[str, Annotated[float, BeforeValidator(_share), Field(ge=0, lt=2**63)]]
"""Weights by source: numbers, or tokens as texts (8B)."""


def tokens_text(tokens: float) -> str:
    """A number of tokens in short: 250M, 1.5k, 10B."""
    for unit in ("T", "B", "M", "k"):
        if abs(tokens) >= UNITS[unit]:
            return f"{float(Decimal(tokens) / UNITS[unit]):.4g}{unit}"  # of any size
    return f"{tokens:.4g}"
