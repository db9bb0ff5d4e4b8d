"""Paired differences against scipy and against numbers worked out by hand."""

import json
import random

import pytest
from scipy import stats

from drover.pipeline.evaluation.scores import scored
from drover.tools.compare import difference
from tests.refusal import table


def ratio(items):
    return sum(value for value, _ in items) / sum(weight for _, weight in items)


def test_ratios_are_paired():
    """Of items of very different weight: the interval is what redrawing them, for both, shows."""
    chance = random.Random(3)
    first = [(size * chance.uniform(1, 2), float(size)) for size in (chance.randint(5, 80) for _ in range(300))]
    second = [(nats - size * chance.gauss(0.02, 0.1), size) for nats, size in first]
    alone, result = scored(first), difference(first, second)
    assert alone["value"] == pytest.approx(ratio(first))
    assert result["difference"] == pytest.approx(ratio(second) - ratio(first)) and result["difference"] < 0
    draws = [ratio([second[place] for place in places]) - ratio([first[place] for place in places])
             for places in (chance.choices(range(300), k=300) for _ in range(4000))]
    assert result["high"] - result["low"] == pytest.approx(2 * 1.96 * stats.tstd(draws), rel=0.05)
    assert result["high"] - result["low"] < 2 * 1.96 * alone["stderr"] / 2, "what both find hard does not count"


@pytest.mark.parametrize(("first", "second", "expected"), table("""
    [null] -> [[1, 1]] -> [NaN, null, null]
    [[1, 2], null, [3, 4]] -> [[2, 2], [9, 1], null] -> [0.5, null, null]
    [[1, 1], [1, 1], [1, 1]] -> [[1, 1], [1, 1], [1, 1]] -> [0, 0, 0]""", json.loads, json.loads, json.loads))
def test_items_without_a_value_are_left_out_of_both(first, second, expected):
    result = difference(first, second)
    assert [result["difference"], result["low"], result["high"]] == pytest.approx(expected, nan_ok=True)
