"""Scores as sums, in plain numbers: a model's loss on a text, and a metric over items, which differ in weight.

A score over n items is a sum of values over a sum of weights,

    S = sum(x_i) / sum(w_i):

the mean with all weights 1 (accuracies), bits per byte with x_i the bits of an item, w_i its bytes. Each item changes
S, to first order (Cochran, Sampling Techniques, 1977, 2.11), by

    u_i = (x_i - S w_i) / sum(w_i),        stderr(S) = sqrt(n / (n - 1) * sum(u_i^2)).

For weights of 1 that is the sample standard deviation over sqrt(n).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypedDict

Item = tuple[float, float] | None
"""(value, weight) of an item; None where it has none."""


class Score(TypedDict):
    """value: None if it is no finite number. stderr: its standard error; None if it has none."""

    value: float | None
    stderr: float | None


def scored(items: Sequence[Item]) -> Score:
    """S, nan for no items, and its standard error, None for fewer than two items."""
    known = [item for item in items if item is not None]
    count = len(known)
    total = math.fsum(weight for _, weight in known)
    score = math.fsum(value for value, _ in known) / total if total else math.nan
    squares = math.fsum(((value - score * weight) / total)**2 for value, weight in known) if total else 0.0
    return {"value": score, "stderr": math.sqrt(count / (count - 1) * squares) if count > 1 else None}


def decimals(value: float, form: str) -> str:
    """A score in this form; from a million on, two digits and an exponent."""
    return format(value, form if abs(value) < 1e6 else ".2g")


@dataclass(frozen=True)
class Measurement:
    """A model's loss on a text. `nats` is the sum over `targets` tokens, which encode `text_bytes` bytes; `documents`
    has the nats of each document, if they were requested."""

    nats: float
    targets: int
    text_bytes: int
    documents: tuple[float, ...] = ()

    @property
    def bits_per_byte(self) -> float:
        """Bits per byte of the original text; nan for no text."""
        return self.nats / (math.log(2) * self.text_bytes) if self.text_bytes else math.nan

    @property
    def loss(self) -> float:
        """Mean nats per target token; nan for no targets."""
        return self.nats / self.targets if self.targets else math.nan

    @property
    def perplexity(self) -> float:
        """exp of the mean nats per target token; inf if that exceeds a float."""
        return math.exp(self.loss) if not self.loss > 709 else math.inf
