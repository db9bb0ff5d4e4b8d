"""Scores of a model over items, and how far two models differ on the same items.

A score over n items is a sum of values over a sum of weights,

    S = sum(x_i) / sum(w_i):

the mean with all weights 1 (accuracies), bits per byte with x_i the bits of an item, w_i its bytes. Each item changes
S, to first order (Cochran, Sampling Techniques, 1977, 2.11), by

    u_i = (x_i - S w_i) / sum(w_i),        stderr(S) = sqrt(n / (n - 1) * sum(u_i^2)).

For weights of 1 that is the sample standard deviation over sqrt(n). Two models on the same items differ by D = sum(d_i)
/ sum(w_i), where d_i is the value of the second less that of the first. It is a score of its own, whose standard error
is smaller than the root of the sum of the two squared errors if the models find the same items hard (Miller, Adding
Error Bars to Evals, 2024, section 4). D +- 1.96 stderr(D) holds the true difference in 95 of 100 comparisons, by the
normal distribution: of some 30 items and more.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

Item = tuple[float, float] | None
"""(value, weight) of an item; None where it has none."""
NORMAL_95 = 1.96


def scored(items: Sequence[Item]) -> dict[str, float | None]:
    """S as `value`, nan for no items, and its standard error as `stderr`, None for fewer than two items."""
    known = [item for item in items if item is not None]
    total, count = math.fsum(weight for _, weight in known), len(known)
    score = math.fsum(value for value, _ in known) / total if total else math.nan
    squares = math.fsum(((value - score * weight) / total)**2 for value, weight in known) if total else 0.0
    return {"value": score, "stderr": math.sqrt(count / (count - 1) * squares) if count > 1 else None}


def difference(first: Sequence[Item], second: Sequence[Item]) -> dict[str, float | None]:
    """`difference` of the second model from the first, on the items that both have in the same order: nan for no items.
    `low` and `high`: the 95% interval; None for fewer than two items. ValueError if weights differ."""
    both = [(one, other) for one, other in zip(first, second, strict=True) if one is not None and other is not None]
    if any(one[1] != other[1] for one, other in both):
        raise ValueError("the items weigh differently: they are not the same ones")
    apart, stderr = scored([(other[0] - one[0], one[1]) for one, other in both]).values()
    if apart is None or stderr is None:
        return {"difference": apart, "low": None, "high": None}
    return {"difference": apart, "low": apart - NORMAL_95 * stderr, "high": apart + NORMAL_95 * stderr}
