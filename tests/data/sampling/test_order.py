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
from pipeline.files import sha256_json


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


@given(tokens=st.integers(40, 4000), length=st.integers(1, 16), seed=st.integers(0, 1000))
@settings(max_examples=50, deadline=None)
def test_every_sequence_once_an_epoch_and_each_epoch_shuffled_by_itself(tokens, length, seed):
    order, count = SampleOrder([Pool("all", tokens)], length, seed), (tokens - 1) // length
    _, epochs, sequences = order.locate(np.arange(2 * count).reshape(2, count))
    assert (epochs == [[0], [1]]).all() and np.array_equal(np.sort(sequences), np.tile(np.arange(count), (2, 1)))
    assert count < 20 or not np.array_equal(*sequences)


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
    """Over three periods every sequence of a source is used as often as any other, or once more; also in parts."""
    pools = [Pool(f"s{index}", count) for index, count in enumerate(tokens)]
    found, samples = SampleOrder(pools, 10, 3, list(shares)), 3 * period + 5
    assert found.period == period
    pool, epoch, sequence = found.locate(np.arange(samples))
    for index, share in enumerate(np.array(shares) / sum(shares)):
        here = pool == index
        assert abs(here.sum() - share * samples) <= 5
        uses = np.bincount(sequence[here], minlength=found.counts[index])
        assert uses.max() - uses.min() <= 1
        assert found.epochs(samples)[f"s{index}"] == here.sum() / found.counts[index]
        assert np.array_equal(np.sort(epoch[here]), np.arange(here.sum()) // found.counts[index])
        for below in (samples - period // 2, 3 * period, period - 1, 0):
            asked = np.arange(index, found.counts[index], 3)
            where, of = found.inverse(index, asked, below)
            wanted = np.flatnonzero(here[:below] & np.isin(sequence[:below], asked))
            assert np.array_equal(where, wanted) and np.array_equal(of, sequence[wanted])
    last = np.arange(samples - 999, samples)
    parts = np.concatenate([np.stack(found.locate(part)) for part in np.array_split(last, 7)], axis=1)
    assert np.array_equal(parts, np.stack([pool, epoch, sequence])[:, -999:])


def test_the_plan_hash_knows_every_ingredient():
    def plan(pools=(("a", 101), ("b", 201)), length=10, seed=0, shares=(1, 1), content="x"):
        return SampleOrder([Pool(*pool) for pool in pools], length, seed, list(shares), content).plan_sha256
    changed = [plan(pools=(("a", 102), ("b", 201))), plan(pools=(("c", 101), ("b", 201))), plan(length=11),
               plan(pools=(("a", 101, 10), ("b", 201, 20))), plan(pools=(("a", 101, 10, "p"), ("b", 201, 20))),
               plan(seed=1), plan(shares=(1, 2)), plan(shares=(1, 1e-4)), plan(content="y"), plan(content=["x"])]
    assert plan() == plan() and len({plan(), *changed}) == 11
    rows = [[f"train/ä-{number}.arrow", f"{number:064x}"] for number in range(2500)]
    for content in (rows, rows[:1], []):
        assert plan(content=content) == plan(content=iter(content))
    for value in ({"c": rows}, {"a": 1, "c": rows}, {"c": rows, "d": [2]}, {"b": 0, "c": rows, "z": "x"}):
        assert sha256_json(value) == sha256_json({**value, "c": iter(rows)}, streamed="c")


def test_a_pool_without_a_sequence_and_a_share_too_small_are_refused():
    with pytest.raises(UserError, match="b do not fill one sequence of 10"):
        SampleOrder([Pool("a", 100), Pool("b", 10)], 10, 0, [1, 1])
    SampleOrder([Pool("a", 100), Pool("b", 10)], 10, 0, [1, 0])  # unused, so allowed
    SampleOrder([Pool("a", 100), Pool("b", 11)], 10, 0, [1, 1])
    with pytest.raises(UserError, match=r"the source s1 3\.33e-06"):
        order_of([3, 1e-5])


def test_the_configuration_refuses_a_share_with_the_smallest_that_can_be_kept():
    sources = [FilesSource(kind="files", name=name, paths=["x.txt"]) for name in ("web", "notes")]
    config = Config(shard=ShardConfig(sources=sources), train=TrainConfig(mixture={"web": 3.0, "notes": 1e-5}))
    said, = problems(config)
    assert "the source notes 3.33e-06 of the training sequences" in said and "7.63e-06 (1 in 131,072)" in said
    kept = TrainConfig(mixture={"web": 1.0, "notes": SMALLEST_SHARE * 1.001})
    assert problems(config.model_copy(update={"train": kept})) == []
    assert order_of(kept.mixture.values()).quotas[1] >= LEAST
