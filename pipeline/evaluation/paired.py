"""Scores of a model over items, and how far two models differ on the same items.

A score over n items is made of a sum of values over a sum of weights,

    R = sum(x_i) / sum(w_i),

and has one of two forms:

- `ratio`, S = R: the mean with all weights 1 (accuracies), bits per byte with x_i the bits of an item, w_i its bytes;
- `perplexity`, S = exp(R), with x_i the nats of an item and w_i its words or bytes, or 1.

Each item changes S, to first order (Cochran, Sampling Techniques, 1977, 2.11, for ratios; the delta method for exp), by

    u_i = S'(R) (x_i - R w_i) / sum(w_i),        stderr(S) = sqrt(n / (n - 1) * sum(u_i^2)),

with S'(R) = 1, of perplexities exp(R). For weights of 1 that is the sample standard deviation over sqrt(n). For two
models on the same items, D = S of the second less S of the first, and its standard error has the same formula with the
u_i of the second less those of the first. It is smaller than the root of the sum of the two squared errors if the
models find the same items hard (Miller, Adding Error Bars to Evals, 2024, section 4). D +- 1.96 stderr(D) holds the
true difference in 95 of 100 comparisons, by the normal distribution: of some 30 items and more.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from drover.pipeline.evaluation.measurement import exp

Item = tuple[float, float] | None
"""(value, weight) of an item; None where it has none."""
Form = Literal["ratio", "perplexity"]
NORMAL_95 = 1.96


@dataclass(frozen=True)
class Difference:
    """The second model less the first, on the items that both have: nan for no items. low, high: the 95% interval; None
    for fewer than two items or if it exceeds a float."""

    difference: float
    low: float | None
    high: float | None


def scored(items: Sequence[Item], form: Form = "ratio") -> dict[str, float | None]:
    """S as `value`, nan for no items, inf if it exceeds a float, and its standard error as `stderr`, None for fewer
    than two items or if that exceeds a float."""
    score, changes = _score([item for item in items if item is not None], form)
    return {"value": score, "stderr": _stderr(score, changes)}


def difference(first: Sequence[Item], second: Sequence[Item], form: Form = "ratio") -> Difference:
    """The difference of two models on the same items in the same order, as defined above. ValueError if their weights
    differ."""
    both = [(one, other) for one, other in zip(first, second, strict=True) if one is not None and other is not None]
    if any(one[1] != other[1] for one, other in both):
        raise ValueError("the items weigh differently: they are not the same ones")
    start, before = _score([one for one, _ in both], form)
    end, after = _score([other for _, other in both], form)
    stderr = _stderr(end - start, [late - early for early, late in zip(before, after, strict=True)])
    reach = None if stderr is None else NORMAL_95 * stderr
    return Difference(end - start, None if reach is None else end - start - reach,
                      None if reach is None else end - start + reach)


def _score(items: Sequence[tuple[float, float]], form: Form) -> tuple[float, list[float]]:
    """S, and the u_i."""
    total = math.fsum(weight for _, weight in items)
    if not total:
        return math.nan, [0.0] * len(items)
    ratio = math.fsum(value for value, _ in items) / total
    score = exp(ratio) if form == "perplexity" else ratio
    slope = score if form == "perplexity" else 1.0
    return score, [slope * (value - ratio * weight) / total for value, weight in items]


def _stderr(score: float, changes: Sequence[float]) -> float | None:
    count = len(changes)
    if count < 2 or not math.isfinite(score):
        return None
    try:
        return math.sqrt(count / (count - 1) * math.fsum(change**2 for change in changes))
    except OverflowError:  # of a perplexity near the largest float
        return None
