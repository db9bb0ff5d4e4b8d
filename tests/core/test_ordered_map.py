"""Results come in the order of their items, few are made ahead, and errors reach who takes them."""

import time

import pytest

from drover.pipeline.core.background import ordered_map


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
