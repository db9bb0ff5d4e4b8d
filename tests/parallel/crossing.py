"""Options crossed: all combinations of them, or fewer that still hold every pair of two options' values."""

from itertools import combinations, product


def every(factors):
    """All combinations of the values of `factors` (name -> values), as dicts; the last factor changes fastest."""
    return [dict(zip(factors, values, strict=True)) for values in product(*factors.values())]


def pairwise(factors):
    """Combinations in which any two values of two factors meet at least once; each holds as many new pairs as any.

    Greedy, without randomness: the same factors give the same combinations.
    """
    candidates = every(factors)
    missing = {pair for candidate in candidates for pair in pairs(candidate)}
    found = []
    while missing:
        best = max(candidates, key=lambda candidate: len(missing & pairs(candidate)))
        missing -= pairs(best)
        found.append(best)
    return found


def pairs(combination):
    """The pairs of values that meet in a combination."""
    return set(combinations(combination.items(), 2))
