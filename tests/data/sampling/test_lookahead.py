"""Places that are found ahead: the order's own, however it is asked, and few of them kept."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.data.sampling.lookahead import MOST, Lookahead
from pipeline.data.sampling.order import Pool, SampleOrder


def an_order():
    return SampleOrder([Pool("a", 3001), Pool("b", 801)], 10, seed=5, shares=[2, 1])


def assert_located(found, order, samples):
    pools, _, sequences = order.locate(np.asarray(samples))
    assert np.array_equal(found[0], pools) and np.array_equal(found[2], sequences)


class Counting:
    """An order that counts how often and for how many it is asked."""

    def __init__(self, order):
        self.order, self.asked = order, []

    def locate(self, samples):
        self.asked.append(np.size(samples))
        return self.order.locate(samples)


@given(requests=st.lists(st.tuples(st.integers(0, 4000), st.integers(1, 20)), min_size=1, max_size=12),
       step=st.integers(-8, 60))
@settings(max_examples=60, deadline=None)
def test_places_are_the_orders(requests, step):
    order = an_order()
    lookahead = Lookahead(order.locate)
    for first, count in requests:
        for turn in range(4):
            samples = np.maximum(0, first + turn * step) + np.arange(count)
            assert_located(lookahead.locate(samples), order, samples)


def test_requests_in_steps_are_answered_with_few_calls():
    """A rank's share of a batch: 8 of 64 samples. Others' numbers are not looked at, and what is kept is bounded."""
    counting = Counting(an_order())
    lookahead = Lookahead(counting.locate)
    for turn in range(6000):
        lookahead.locate(64 * turn + np.arange(8))
        assert len(lookahead._found) * 8 <= MOST
    assert len(counting.asked) < 20 and max(counting.asked) == MOST
    assert sum(counting.asked) < 8 * 6000 + MOST


def test_requests_at_random_cost_what_they_ask_for():
    counting, draw = Counting(an_order()), np.random.default_rng(0)
    lookahead = Lookahead(counting.locate)
    for _ in range(50):
        lookahead.locate(draw.permutation(1000)[:16])
    assert counting.asked == [16] * 50


def test_a_gap_in_the_numbers_is_gone_over():
    """A rollback left samples out: requests before and after it are in steps, with one that is not."""
    order = an_order()
    lookahead, numbers = Lookahead(order.locate), np.setdiff1d(np.arange(4000), np.arange(1003, 1011))
    for samples in numbers[:numbers.size // 8 * 8].reshape(-1, 8):
        assert_located(lookahead.locate(samples), order, samples)


def test_what_is_asked_is_not_kept_by_reference():
    order = an_order()
    lookahead, samples = Lookahead(order.locate), np.arange(4)
    for _ in range(6):
        assert_located(lookahead.locate(samples), order, samples)
        samples += 4


def test_threads_may_share_it():
    order = an_order()
    lookahead, requests = Lookahead(order.locate), [16 * turn + np.arange(16) for turn in range(400)]
    with ThreadPoolExecutor(8) as pool:
        for samples, found in zip(requests, pool.map(lookahead.locate, requests), strict=True):
            assert_located(found, order, samples)
