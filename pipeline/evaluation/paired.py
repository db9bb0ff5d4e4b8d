"""Two models on the same items: how far they differ, and whether that may be chance.

A score over n items is a sum of values over a sum of weights,

    S = sum(x_i) / sum(w_i),

the mean with all weights 1 (accuracies), bits per byte with x_i the bits of an item and w_i its bytes. The standard
error is that of a ratio (Cochran, Sampling Techniques, 1977, 2.11), linearised:

    stderr(S) = sqrt(n / (n - 1) * sum((x_i - S w_i)^2)) / sum(w_i),

which for weights of 1 is the sample standard deviation over sqrt(n). Of two models that answered the same items, what
counts is the difference on each item, d_i = x_i of the second less x_i of the first: D = sum(d_i) / sum(w_i) and the
same formula with d and D, which is smaller than the two errors added in squares as far as the models find the same
items hard (Miller, Adding Error Bars to Evals, 2024, section 4). Two tests:

- z: D / stderr(D), two-sided by the normal distribution; for some 30 items and more.
- the exact sign test: of the items that differ, is the second higher in about half? With b higher and c lower,
  p = min(1, 2 * sum over k <= min(b, c) of binomial(b + c, k) / 2^(b + c)). Of right and wrong answers this is the
  exact McNemar test. It holds for any number of items.

No p-value knows how many other comparisons stand beside it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

Item = tuple[float, float] | None
"""(value, weight) of an item; None where it has none."""


@dataclass(frozen=True)
class Difference:
    """The second model less the first, on the items that both have.

    Attributes:
        items: how many.
        difference: D.
        stderr: of D; None for fewer than two items.
        higher, lower: items on which the second has the higher, or the lower, value.
        p_sign: of the exact sign test.
        p_normal: of z; None without a standard error.
    """

    items: int
    difference: float
    stderr: float | None
    higher: int
    lower: int
    p_sign: float
    p_normal: float | None


def score(items: Sequence[Item]) -> tuple[float, float | None]:
    """S and its standard error (None for fewer than two items); nan for no items."""
    known = [item for item in items if item is not None]
    return _ratio([value for value, _ in known], [weight for _, weight in known])


def difference(first: Sequence[Item], second: Sequence[Item]) -> Difference:
    """What the module says, of the items of two models in the same order; ValueError where their weights differ."""
    both = [(one, other) for one, other in zip(first, second, strict=True) if one is not None and other is not None]
    if any(one[1] != other[1] for one, other in both):
        raise ValueError("the items weigh differently: they are not the same ones")
    apart = [other[0] - one[0] for one, other in both]
    found, stderr = _ratio(apart, [one[1] for one, _ in both])
    higher, lower = sum(value > 0 for value in apart), sum(value < 0 for value in apart)
    return Difference(len(both), found, stderr, higher, lower, sign_test(higher, lower), _p_normal(found, stderr))


def sign_test(higher: int, lower: int) -> float:
    """Two-sided p of so many signs of each kind if both were equally likely; 1 where there are none."""
    count, tail, term = higher + lower, 0, 1
    for taken in range(min(higher, lower) + 1):  # integers: exact for any count
        tail += term
        term = term * (count - taken) // (taken + 1)
    return min(1.0, 2 * tail / 2**count)


def _ratio(values: Sequence[float], weights: Sequence[float]) -> tuple[float, float | None]:
    total, count = math.fsum(weights), len(values)
    if not total:
        return math.nan, None
    found = math.fsum(values) / total
    if count < 2:
        return found, None
    squares = math.fsum((value - found * weight) ** 2 for value, weight in zip(values, weights, strict=True))
    return found, math.sqrt(count / (count - 1) * squares) / total


def _p_normal(found: float, stderr: float | None) -> float | None:
    if stderr is None or math.isnan(found):
        return None
    if stderr == 0:
        return 1.0 if found == 0 else 0.0
    return math.erfc(abs(found) / stderr / math.sqrt(2))
