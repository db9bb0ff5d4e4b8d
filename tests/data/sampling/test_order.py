"""The order of samples: a bijection per epoch, exact shares however small, backwards as forwards, and a function of
nothing but the sample number."""

import hashlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.config.checks import problems
from pipeline.config.data import FilesSource, ShardConfig
from pipeline.config.mixture import SMALLEST_SHARE
from pipeline.config.training import TrainConfig
from pipeline.config.tree import Config
from pipeline.data.sampling.order import LEAST, PERIOD, Pool, SampleOrder, permute, unpermute
from pipeline.errors import UserError


def order_of(shares, seed=3, content="x"):
    return SampleOrder([Pool(f"s{index}", 5000 + 1000 * index) for index in range(len(shares))], 10, seed,
                       list(shares), content)


@given(size=st.integers(1, 3000) | st.sampled_from([2, 3, 4, 1023, 1024, 1025]) | st.integers(1, 1 << 40),
       seed=st.integers(0, 1 << 64), part=st.integers(-3, 1 << 20))
@settings(max_examples=100, deadline=None)
def test_permute_is_a_bijection_that_unpermute_undoes(size, seed, part):
    numbers = np.arange(size) if size <= 3000 else np.unique(np.random.default_rng(0).integers(0, size, 1000))
    key = (seed, part, 7)
    found = permute(numbers, size, key)
    assert found.min() >= 0 and found.max() < size and len(np.unique(found)) == len(numbers)
    assert np.array_equal(unpermute(found, size, key), numbers)
    assert np.array_equal(permute(unpermute(numbers, size, key), size, key), numbers)


@pytest.mark.parametrize(("shares", "places", "plan"), [
    ([1, 1], "f271a18f4474962d", "98d5acc63f067cfd"), ([0.7, 0.2, 0.1], "e965beb8828a3748", "5f0ae413140f35d4"),
    ([1, 0, 3], "405b1795dc8b30d0", "78a88705f69b4dec"), ([1, 0.9 / 4096], "08bae0a75ceeca75", "edd16ff63e83d4c2"),
    ([1.0] * 7, "fe9247254232512e", "cca54251acf1a548")])
def test_the_order_never_changes(shares, places, plan):
    """A change here orphans every run in progress: it needs a new ALGORITHM number."""
    found = order_of(shares)
    assert found.period == PERIOD and found.plan_sha256[:16] == plan
    assert hashlib.sha256(np.stack(found.locate(np.arange(20_000))).tobytes()).hexdigest()[:16] == places
    assert permute(np.arange(10), 10, (0, 0, 0)).tolist() == [5, 8, 0, 9, 7, 2, 6, 4, 3, 1]


@given(exponents=st.lists(st.floats(-16.9, 0) | st.floats(-4, 0) | st.just(-np.inf), min_size=1, max_size=4),
       seed=st.integers(0, 9))
@settings(max_examples=15, deadline=None)
def test_every_share_is_met_in_every_period(exponents, seed):
    shares = np.array([1.0, *(2.0**exponent for exponent in exponents)])
    shares = np.where(shares > 0, np.maximum(shares, SMALLEST_SHARE * shares.sum() * 1.01), 0)
    found, used = order_of(shares, seed), shares > 0
    wanted = shares / shares.sum() * found.period
    counts = np.bincount(found.pattern, minlength=len(shares))  # which `locate` goes through again and again
    assert np.abs(counts - wanted).max() <= 1 and (counts[used] > 0).all()
    if found.period > PERIOD:
        assert found.quotas[used].min() >= LEAST and np.abs(counts[used] / wanted[used] - 1).max() <= 1 / LEAST


@pytest.mark.parametrize(("tokens", "shares", "period"), [
    ((2001, 901), (0.7, 0.3), PERIOD), ((300_000, 51, 101), (1, 1e-4, 7e-5), 2**17)])
def test_each_source_is_gone_through_exactly_and_counted(tokens, shares, period):
    """Over three periods every sequence of a source comes once an epoch, each epoch in an order of its own; also
    backwards and in parts."""
    found, samples = SampleOrder([Pool(f"s{index}", count) for index, count in enumerate(tokens)], 10, 3,
                                 list(shares)), 3 * period + 5
    assert found.period == period
    pool, epoch, sequence = found.locate(np.arange(samples))
    for index, share in enumerate(np.array(shares) / sum(shares)):
        here, count = pool == index, (tokens[index] - 1) // 10
        assert abs(here.sum() - share * samples) <= 5
        assert found.epochs(samples)[f"s{index}"] == here.sum() / count
        assert np.array_equal(np.sort(epoch[here]), np.arange(here.sum()) // count)
        own, another = (sequence[here & (epoch == number)] for number in (0, 1))
        assert np.array_equal(np.sort(own), np.arange(count)) and own.tolist() != another.tolist()
        for below in (samples - period // 2, 3 * period, period - 1, 0):
            asked = np.arange(index, count, 3)
            where, of = found.inverse(index, asked, below)
            wanted = np.flatnonzero(here[:below] & np.isin(sequence[:below], asked))
            assert np.array_equal(where, wanted) and np.array_equal(of, sequence[wanted])
    parts = [np.stack(found.locate(part)) for part in np.array_split(np.arange(samples - 999, samples), 7)]
    assert np.array_equal(np.concatenate(parts, axis=1), np.stack([pool, epoch, sequence])[:, -999:])


def test_the_plan_hash_knows_every_ingredient():
    plain = {"pools": [("a", 101), ("b", 201)], "length": 10, "seed": 0, "shares": [1, 1], "content": "x"}

    def plan(**changes):
        asked = plain | changes
        return SampleOrder([Pool(*pool) for pool in asked.pop("pools")], **asked).plan_sha256
    changed = [{}, {"length": 11}, {"seed": 1}, {"shares": [1, 2]}, {"shares": [1, 1e-4]}, {"content": "y"},
               {"content": ["x"]}, *({"pools": pools} for pools in (
                   [("a", 102), ("b", 201)], [("c", 101), ("b", 201)], [("a", 101, 10), ("b", 201, 20)],
                   [("a", 101, 10, "p"), ("b", 201, 20)]))]
    assert plan() == plan() and len({plan(**change) for change in changed}) == 11
    rows = [[f"train/ä-{number}.arrow", f"{number:064x}"] for number in range(2500)]
    assert all(plan(content=content) == plan(content=iter(content)) for content in (rows, rows[:1], []))


def test_a_pool_without_a_sequence_and_a_share_too_small_are_refused():
    with pytest.raises(UserError, match="b do not fill one sequence of 10"):
        SampleOrder([Pool("a", 100), Pool("b", 10)], 10, 0, [1, 1])
    SampleOrder([Pool("a", 100), Pool("b", 10)], 10, 0, [1, 0])  # unused, so allowed
    SampleOrder([Pool("a", 100), Pool("b", 11)], 10, 0, [1, 1])
    with pytest.raises(UserError, match=r"the source s1 3\.33e-06"):
        order_of([3, 1e-5])


def test_the_configuration_refuses_a_share_with_the_smallest_that_can_be_kept():
    config = Config(train=TrainConfig(mixture={"web": 3.0, "notes": 1e-5}), shard=ShardConfig(sources=[
        FilesSource(kind="files", name=name, paths=["x.txt"]) for name in ("web", "notes")]))
    said, = problems(config)
    assert "the source notes 3.33e-06 of the training sequences" in said and "7.63e-06 (1 in 131,072)" in said
    config.train.mixture["notes"] = 3.0 * SMALLEST_SHARE * 1.001
    assert problems(config) == [] and order_of(config.train.mixture.values()).quotas[1] >= LEAST
