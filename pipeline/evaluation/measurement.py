"""A model's loss on a text as sums: plain numbers, which the report reads without torch."""

from __future__ import annotations

import math
from dataclasses import dataclass


def exp(value: float) -> float:
    """The exponential function; inf if it exceeds a float."""
    return math.exp(value) if not value > 709 else math.inf


@dataclass(frozen=True)
class Measurement:
    """A model's loss on a text. `nats` is the sum over `targets` tokens, which encode `text_bytes` bytes."""

    nats: float
    targets: int
    text_bytes: int

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
        return exp(self.loss)
