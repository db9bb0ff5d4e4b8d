"""Results come in the order of their items, few are made ahead, and errors reach who takes them."""

import time

import pytest

from drover.pipeline.core.background import ordered_map
from tests.refusal import refused


@pytest.mark.parametrize(("threads", "batch"), [(5, 1), (3, 4)])
def test_results_keep_the_order_of_slow_and_fast_items(threads, batch):
    started = []

    def make(item):
        started.append(item)
        time.sleep(0.02 if item % 3 == 0 else 0.0)
        return item
    result = ordered_map(make, range(20), threads, batch=batch)
    assert [next(result) for _ in range(3)] == [0, 1, 2] and max(started) < (2 + threads) * batch + 1
    assert [*result] == list(range(3, 20)) and sorted(started) == list(range(20))


@pytest.mark.parametrize("count", [1, 9])
def test_an_error_reaches_who_takes_its_result(count):
    def make(item):
        raise OSError("disk gone")
    refused(OSError, "disk gone", next, ordered_map(make, range(count), 2))
