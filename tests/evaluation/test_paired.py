"""Paired differences against scipy and against numbers worked out by hand."""

import json
import math
import random

import pytest
from scipy import stats

from drover.pipeline.evaluation.paired import difference, scored, sign_test
from tests.refusal import refused, table


@pytest.mark.parametrize(("higher", "lower"), [
    (0, 0), (1, 0), (5, 5), (2, 8), (1100, 1000), (3000, 9)])
def test_the_sign_test_is_the_exact_binomial_one(higher, lower):
    expected = stats.binomtest(higher, higher + lower).pvalue if higher + lower else 1.0
    assert sign_test(higher, lower) == pytest.approx(expected, rel=1e-9, abs=1e-300)


def test_means_have_the_paired_t_tests_statistic():
    chance = random.Random(1)
    first = [chance.gauss(0, 1) for _ in range(50)]
    second = [value + chance.gauss(0.1, 0.3) for value in first]
    found = difference([(value, 1.0) for value in first], [(value, 1.0) for value in second])
    assert found.difference / found.stderr == pytest.approx(stats.ttest_rel(second, first).statistic)
    assert scored([(value, 1.0) for value in first]) == pytest.approx(
        {"value": sum(first) / 50, "stderr": stats.sem(first)})


@pytest.mark.parametrize(("nats", "value"), [(2000.0, math.inf), (705.0, pytest.approx(math.exp(705.0)))])
def test_a_perplexity_near_the_largest_float_and_beyond_it_has_no_error(nats, value):
    items = [(nats, 1.0), (nats + 1, 1.0), (nats - 1, 1.0)]
    assert scored(items, "perplexity") == {"value": value, "stderr": None}
    found = difference([(1.0, 1.0)] * 3, items, "perplexity")
    assert (found.difference, found.stderr, found.p_normal, found.higher) == (value, None, None, 3)


def redrawn(first, second, value):
    """Standard deviation of value(second) - value(first) over 4,000 draws of the same items for both."""
    chance = random.Random(4)
    draws = []
    for _ in range(4000):
        places = chance.choices(range(len(first)), k=len(first))
        draws.append(value([second[place] for place in places]) - value([first[place] for place in places]))
    return stats.tstd(draws)


def ratio(items):
    return sum(value for value, _ in items) / sum(weight for _, weight in items)


@pytest.mark.parametrize(("form", "value"), [("ratio", ratio), ("perplexity", lambda items: math.exp(ratio(items)))])
def test_ratios_and_their_exponentials_are_paired(form, value):
    """Of items of very different weight: the error is what redrawing them, for both, shows."""
    chance = random.Random(3)
    first = [(size * chance.uniform(1, 2), float(size)) for size in (chance.randint(5, 80) for _ in range(300))]
    second = [(nats - size * chance.gauss(0.02, 0.1), size) for nats, size in first]
    alone, found = scored(first, form), difference(first, second, form)
    assert alone["value"] == pytest.approx(value(first))
    assert found.difference == pytest.approx(value(second) - value(first)) and found.difference < 0
    assert found.stderr == pytest.approx(redrawn(first, second, value), rel=0.05)
    assert found.stderr < alone["stderr"] / 2, "what both find hard does not count"
    assert found.p_sign == sign_test(found.higher, found.lower)
    assert found.p_normal == pytest.approx(2 * stats.norm.sf(-found.difference / found.stderr))


def added(gold, answers):
    """(value, weight) of each answer, as f1 adds them."""
    return [(2.0 * (right and said), float(right + said)) for right, said in zip(gold, answers, strict=True)]


def test_f1_by_hand():
    """First: a true positive, a false positive, a false negative: 2 / 4. Second: all right. A true negative adds
    nothing, and where no item is or is called positive, f1 is 0, as scikit-learn has it."""
    gold = [True, False, True, False]
    found = difference(added(gold, [True, True, False, False]), added(gold, gold), "f1")
    assert (found.difference, found.higher, found.lower, found.items) == (0.5, 2, 0, 4)
    # Moves of the first: (2 - 1/2 x 2) / 4, (0 - 1/2) / 4 twice, 0; of the second none.
    assert found.stderr == pytest.approx(math.sqrt(4 / 3 * (1 + 1 / 4 + 1 / 4) / 16))
    nothing = added([False, False], [False, False])
    assert scored(nothing, "f1") == {"value": 0.0, "stderr": 0.0}
    assert difference(nothing, added([False, False], [True, False]), "f1").lower == 1


@pytest.mark.parametrize(("first", "second", "expected"), table("""
    [null] -> [[1, 1]] -> [0, NaN, null, null]
    [[1, 2], null, [3, 4]] -> [[2, 2], [9, 1], null] -> [1, 0.5, null, null]
    [[1, 1], [1, 1], [1, 1]] -> [[1, 1], [1, 1], [1, 1]] -> [3, 0, 0, 1]""", json.loads, json.loads, json.loads))
def test_items_without_a_value_are_left_out_of_both(first, second, expected):
    found = difference(first, second)
    assert [found.items, found.difference, found.stderr, found.p_normal] == pytest.approx(expected, nan_ok=True)


def test_items_that_weigh_differently_are_not_the_same():
    refused(ValueError, "not the same", difference, [(1.0, 2.0)], [(1.0, 3.0)])
