"""The data order: a bijection per epoch, exact shares, and a function of nothing but the sample number."""

import hashlib
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.data.sampling.order import PERIOD, Pool, SampleOrder, permute
from pipeline.errors import UserError


@given(size=st.integers(1, 3000), key=st.tuples(st.integers(0, 2**63), st.integers(0, 9)))
@settings(max_examples=60, deadline=None)
def test_permute_is_a_bijection(size, key):
    result = permute(np.arange(size), size, key)
    assert np.array_equal(np.sort(result), np.arange(size))


@pytest.mark.parametrize("size", [2, 3, 4, 5, 1023, 1024, 1025, 99_991])
def test_permute_is_a_bijection_at_powers_of_two_and_around(size):
    assert len(np.unique(permute(np.arange(size), size, (1, 2)))) == size


def test_permute_handles_sizes_beyond_memory():
    size = 1_830_000_000  # sequences of 8,192 in 15T tokens
    numbers = np.random.default_rng(0).integers(0, size, 100_000)
    result = permute(numbers, size, (0, 0, 0))
    assert result.min() >= 0 and result.max() < size
    assert len(np.unique(result)) == len(np.unique(numbers))


def test_permute_looks_random():
    size = 4096
    result = permute(np.arange(size), size, (7, 0, 0))
    correlation = np.corrcoef(np.arange(size), result)[0, 1]
    steps = np.corrcoef(result[:-1], result[1:])[0, 1]
    assert abs(correlation) < 0.06 and abs(steps) < 0.06  # 4 standard deviations of chance
    assert not np.array_equal(result, permute(np.arange(size), size, (8, 0, 0)))


@given(tokens=st.integers(40, 4000), length=st.integers(1, 16), seed=st.integers(0, 1000))
@settings(max_examples=50, deadline=None)
def test_every_sequence_once_an_epoch(tokens, length, seed):
    order = SampleOrder([Pool("all", tokens)], length, seed)
    count = (tokens - 1) // length
    for epoch in range(2):
        _, epochs, sequences = order.locate(np.arange(epoch * count, (epoch + 1) * count))
        assert set(epochs) == {epoch}
        assert np.array_equal(np.sort(sequences), np.arange(count))


def test_epochs_are_shuffled_differently():
    order = SampleOrder([Pool("all", 1001)], 10, seed=3)
    first, second = (order.locate(np.arange(start, start + 100))[2] for start in (0, 100))
    assert not np.array_equal(first, second)


@given(shares=st.lists(st.floats(0, 10), min_size=2, max_size=5).filter(
    lambda shares: sum(shares) > 0.1 and all(not share or share / sum(shares) > 1 / PERIOD for share in shares)),
       seed=st.integers(0, 99))
@settings(max_examples=30, deadline=None)
def test_mixture_meets_its_shares_in_every_period(shares, seed):
    pools = [Pool(f"s{index}", 5000 + 1000 * index) for index in range(len(shares))]
    order = SampleOrder(pools, 10, seed, shares)
    wanted = np.array(shares) / sum(shares)
    for block in (0, 5):
        pool, _, _ = order.locate(np.arange(block * PERIOD, (block + 1) * PERIOD))
        assert np.abs(np.bincount(pool, minlength=len(shares)) - wanted * PERIOD).max() <= 1


def test_mixture_goes_through_each_pool_exactly():
    """Over an epoch boundary of both pools: no sequence of a pool twice before each was used once."""
    order = SampleOrder([Pool("a", 2001), Pool("b", 901)], 10, seed=1, shares=[0.7, 0.3])
    pool, epoch, sequence = order.locate(np.arange(2000))
    for index, size in ((0, 200), (1, 90)):
        used = Counter(zip(epoch[pool == index], sequence[pool == index], strict=True))
        assert max(used.values()) == 1
        last = epoch[pool == index].max()
        for turn in range(last):
            assert sum(1 for key in used if key[0] == turn) == size
    assert order.epochs(2000) == {"a": (pool == 0).sum() / 200, "b": (pool == 1).sum() / 90}


@given(cuts=st.lists(st.integers(1, 400), max_size=6), world=st.sampled_from([1, 2, 3, 4, 6, 8, 12]))
@settings(max_examples=40, deadline=None)
def test_order_does_not_depend_on_how_it_is_asked(cuts, world):
    """However samples are cut into calls, restarts and ranks, they are the same samples."""
    order = SampleOrder([Pool("a", 3001), Pool("b", 801)], 10, seed=5, shares=[2, 1])
    whole = np.stack(order.locate(np.arange(480)))
    again = SampleOrder([Pool("a", 3001), Pool("b", 801)], 10, seed=5, shares=[2, 1])
    edges = sorted({0, 480, *cuts} & set(range(481)))
    pieces = []
    for start, stop in pairwise(edges):
        ranks = np.array_split(np.arange(start, stop), world)
        pieces += [np.stack(again.locate(numbers)) for numbers in ranks if len(numbers)]
    assert np.array_equal(whole, np.concatenate(pieces, axis=1))


def test_plan_hash_knows_every_ingredient():
    def plan(pools=(("a", 101), ("b", 201)), length=10, seed=0, shares=(1, 1), content="x"):
        return SampleOrder([Pool(*pool) for pool in pools], length, seed, list(shares), content).plan_sha256
    base = plan()
    assert plan() == base
    changed = [plan(pools=(("a", 102), ("b", 201))), plan(length=11), plan(seed=1), plan(shares=(1, 2)),
               plan(content="y")]
    assert len({base, *changed}) == 6


def test_a_pool_without_a_sequence_is_refused():
    with pytest.raises(UserError, match="b do not fill one sequence of 10"):
        SampleOrder([Pool("a", 100), Pool("b", 10)], 10, 0, [1, 1])
    SampleOrder([Pool("a", 100), Pool("b", 10)], 10, 0, [1, 0])  # unused, so allowed


def test_golden_order_never_changes():
    """A change here orphans every run in progress: it needs a new ALGORITHM number."""
    assert permute(np.arange(10), 10, (0, 0, 0)).tolist() == [5, 8, 0, 9, 7, 2, 6, 4, 3, 1]
    _, _, sequences = SampleOrder([Pool("all", 10_001)], 10, seed=42).locate(np.arange(5))
    assert sequences.tolist() == [374, 656, 978, 621, 536]


def test_golden_plan_of_a_mixture_never_changes():
    """Hash and places, over several epochs of both pools, as they were before sequences could be packed."""
    order = SampleOrder([Pool("a", 3001), Pool("b", 801)], 10, 5, [2, 1], [["train/a.arrow", "00"]])
    assert order.plan_sha256 == "4e1eceb4a1fd34a33fc69eacd1b15f4b890cd62c57cd277d6eb043e7deec57b0"
    places = np.stack(order.locate(np.arange(5000))).astype("<i8")
    assert hashlib.sha256(places.tobytes()).hexdigest() == \
        "43fc13857da57e7e0e36ddb0c82851c1defc1782aa28233233cd24182ea0bb52"
