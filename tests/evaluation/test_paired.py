"""Paired differences against scipy and against numbers worked out by hand."""

import math
import random

import pytest
from scipy import stats

from pipeline.evaluation.paired import difference, score, sign_test


@pytest.mark.parametrize(("higher", "lower"), [
    (0, 0), (1, 0), (5, 5), (8, 2), (2, 8), (40, 17), (1100, 1000), (3000, 9)])
def test_the_sign_test_is_the_exact_binomial_one(higher, lower):
    expected = stats.binomtest(higher, higher + lower).pvalue if higher + lower else 1.0
    assert sign_test(higher, lower) == pytest.approx(expected, rel=1e-9, abs=1e-300)


def test_mcnemar_by_hand():
    """9 discordant items, 8 to 1: p = 2 (1 + 9) / 2^9."""
    first = [(1.0, 1.0)] * 6 + [(0.0, 1.0)] * 8 + [(1.0, 1.0)] + [(0.0, 1.0)] * 5
    second = [(1.0, 1.0)] * 6 + [(1.0, 1.0)] * 8 + [(0.0, 1.0)] + [(0.0, 1.0)] * 5
    found = difference(first, second)
    assert (found.items, found.higher, found.lower) == (20, 8, 1)
    assert found.p_sign == pytest.approx(20 / 512)
    assert found.difference == pytest.approx(7 / 20)
    # Sample variance of 8 ones, 1 minus one and 11 zeros, by hand: (9 - 49 / 20) / 19.
    assert found.stderr == pytest.approx(math.sqrt((9 - 49 / 20) / 19 / 20))
    assert found.p_normal == pytest.approx(2 * stats.norm.sf(found.difference / found.stderr))


def test_means_have_the_paired_t_tests_statistic():
    chance = random.Random(1)
    first = [chance.gauss(0, 1) for _ in range(50)]
    second = [value + chance.gauss(0.1, 0.3) for value in first]
    found = difference([(value, 1.0) for value in first], [(value, 1.0) for value in second])
    assert found.difference / found.stderr == pytest.approx(stats.ttest_rel(second, first).statistic)
    value, stderr = score([(value, 1.0) for value in first])
    assert (value, stderr) == (pytest.approx(sum(first) / 50), pytest.approx(stats.sem(first)))
    assert found.stderr < stderr, "what both find hard does not count"


def test_the_error_of_a_ratio_is_what_redrawing_the_items_shows():
    """Bits per byte of items of very different length: the spread of the ratio over 4,000 bootstrap draws."""
    chance = random.Random(2)
    items = [(size * chance.uniform(1, 3), float(size)) for size in (chance.randint(5, 400) for _ in range(300))]
    value, stderr = score(items)
    assert value == pytest.approx(sum(bits for bits, _ in items) / sum(size for _, size in items))
    draws = []
    for _ in range(4000):
        drawn = chance.choices(items, k=len(items))
        draws.append(sum(bits for bits, _ in drawn) / sum(size for _, size in drawn))
    assert stderr == pytest.approx(stats.tstd(draws), rel=0.05)


def test_items_without_a_value_are_left_out_of_both():
    found = difference([(1.0, 2.0), None, (3.0, 4.0)], [(2.0, 2.0), (9.0, 1.0), None])
    assert (found.items, found.difference, found.stderr, found.p_normal) == (1, 0.5, None, None)
    assert difference([(1.0, 1.0)] * 3, [(1.0, 1.0)] * 3).p_normal == 1.0
    assert math.isnan(score([])[0])


def test_items_that_weigh_differently_are_not_the_same():
    with pytest.raises(ValueError, match="not the same"):
        difference([(1.0, 2.0)], [(1.0, 3.0)])
