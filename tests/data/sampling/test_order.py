"""The order of samples in one phase: a bijection per epoch, exact shares however small, and a function of nothing
but the sample number."""

import hashlib
from types import SimpleNamespace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from drover.pipeline.config.training import SMALLEST_SHARE
from drover.pipeline.data.sampling.order import LEAST, PERIOD, Mix, Order, Pool, Segment, permute
from tests.token_shards import plan_of


def order_of(shares, tokens=None, seed=3, content="x", length=10, space=None):
    mixture = {f"s{index}": float(share) for index, share in enumerate(shares)}
    pools = [Pool(*own) for own in zip(mixture, tokens or range(5000, 9000, 1000), strict=False)]
    return Order(pools, plan_of(sequence_length=length, batch_tokens=length, mixture=mixture), seed, content, space)


@given(size=st.integers(1, 3000) | st.sampled_from([2, 3, 4, 1023, 1024, 1025]) | st.integers(1, 1 << 40),
       seed=st.integers(0, 1 << 64), part=st.integers(-3, 1 << 20))
def test_permute_is_a_bijection(size, seed, part):
    numbers = np.arange(size) if size <= 3000 else np.unique(np.random.default_rng(0).integers(0, size, 1000))
    key = (seed, part, 7)
    result = permute(numbers, size, key)
    assert result.min() >= 0 and result.max() < size and len(np.unique(result)) == len(numbers)


def test_the_order_never_changes():
    """A change here orphans every run in progress: it needs a new VERSION. test_phases.py has larger shares."""
    order = order_of([1, 0.9 / 4096])
    result = order.locate(np.arange(20_000))
    places = np.stack([result.pool, result.epoch, result.sequence])
    assert hashlib.sha256(places).hexdigest()[:16] == "08bae0a75ceeca75"
    assert order.plan_sha256[:16] == "33a247017aa59813" and not result.space.any()


@given(exponents=st.lists(st.floats(-16.9, 0) | st.floats(-4, 0) | st.just(-np.inf), min_size=1, max_size=4),
       seed=st.integers(0, 9))
@settings(max_examples=15)
def test_every_share_is_met_in_every_period(exponents, seed):
    shares = np.array([1.0, *(2.0**exponent for exponent in exponents)])
    shares = np.where(shares > 0, np.maximum(shares, SMALLEST_SHARE * shares.sum() * 1.01), 0)
    result, used = Mix("abcde"[:len(shares)], shares, seed), shares > 0
    wanted = shares / shares.sum() * result.period
    counts = np.bincount(result.pattern, minlength=len(shares))  # which `turns` goes through again and again
    assert np.abs(counts - wanted).max() <= 1 and (counts[used] > 0).all()
    if result.period > PERIOD:
        assert result.quotas[used].min() >= LEAST and np.abs(counts[used] / wanted[used] - 1).max() <= 1 / LEAST


def test_the_plan_hash_knows_every_ingredient():
    def packed(*counts, identity=""):
        return SimpleNamespace(segments=lambda length: [Segment(0, count, 9 * count, identity) for count in counts])

    def plan(shares=(1, 1), tokens=(101, 201), **changes):
        return order_of(shares, tokens, **changes).plan_sha256
    changed = [{}, {"length": 11}, {"seed": 1}, {"shares": [1, 2]}, {"shares": [1, 1e-4]}, {"content": "y"},
               {"content": ["x"]}, {"tokens": (102, 201)}, {"space": packed(10, 20)},
               {"space": packed(10, 20, identity="p")}]
    assert plan() == plan() and len({plan(**change) for change in changed}) == 10
