"""Options crossed: all combinations of them, or fewer that still hold every pair of two options' values."""

from itertools import combinations, product


def every(factors):
    """All combinations of the values of `factors` (name -> values), as dicts; the last factor changes fastest."""
    return [dict(zip(factors, values, strict=True)) for values in product(*factors.values())]


def pairwise(factors):
    """Combinations in which any two values of two factors meet at least once."""
    return covering(every(factors), dict.items)


def covering(candidates, options, cost=lambda candidate: 1):
    """Few of the candidates, in which any two options meet that meet in one of all.

    options: those of a candidate, as pairs of name and value. Each that is taken holds as many new pairs for its cost
    as any. Greedy, without randomness: the same candidates give the same result.
    """
    left = [(candidate, pairs(options(candidate))) for candidate in candidates]
    missing = set().union(*(held for _, held in left))
    result = []
    while missing:
        best, held = max(left, key=lambda each: len(missing & each[1]) / cost(each[0]))
        missing -= held
        result.append(best)
    return result


def pairs(options):
    """The pairs of options that meet."""
    return set(combinations(options, 2))
