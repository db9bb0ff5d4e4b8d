"""A source with a small share in the mixture gets it; one with a share that cannot be kept is refused, not left out."""

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
from pipeline.data.sampling.order import ALGORITHM, LEAST, PERIOD, Pool, SampleOrder
from pipeline.errors import UserError
from pipeline.files import sha256_json


def order(shares, seed=3, content="x"):
    return SampleOrder([Pool(f"s{index}", 5000 + 1000 * index) for index in range(len(shares))], 10, seed,
                       list(shares), content)


@pytest.mark.parametrize(("shares", "places", "plan"), [
    ([1, 1], "f271a18f4474962d", "98d5acc63f067cfd"), ([0.7, 0.2, 0.1], "e965beb8828a3748", "5f0ae413140f35d4"),
    ([1, 0, 3], "405b1795dc8b30d0", "78a88705f69b4dec"), ([1, 1 / 4096], "08bae0a75ceeca75", "94ab4748ae08a0e3"),
    ([1, 0.9 / 4096], "08bae0a75ceeca75", "edd16ff63e83d4c2"), ([1.0] * 7, "fe9247254232512e", "cca54251acf1a548")])
def test_runs_that_were_begun_go_on_in_their_order(shares, places, plan):
    """Recorded before there were longer periods: every source had samples, so nothing may move."""
    found = order(shares)
    assert found.period == PERIOD and found.plan_sha256[:16] == plan
    assert hashlib.sha256(np.stack(found.locate(np.arange(20_000))).tobytes()).hexdigest()[:16] == places


@given(exponents=st.lists(st.floats(-16.9, 0), min_size=1, max_size=4), seed=st.integers(0, 9))
@settings(max_examples=8, deadline=None)
def test_every_share_is_met_in_every_period(exponents, seed):
    shares = np.array([1.0, *(2.0**exponent for exponent in exponents)])
    shares = np.maximum(shares, SMALLEST_SHARE * shares.sum() * 1.01)
    found = order(shares, seed)
    wanted = shares / shares.sum() * found.period
    counts = np.bincount(found.pattern, minlength=len(shares))  # which `locate` goes through again and again
    assert np.abs(counts - wanted).max() <= 1 and counts.min() > 0
    if found.period > PERIOD:
        assert found.quotas.min() >= LEAST and np.abs(counts / wanted - 1).max() <= 1 / LEAST


def test_a_small_source_is_gone_through_exactly_and_counted():
    """Over three periods of 131,072: every sequence of a source is used as often as any other, or once more."""
    def small():
        return SampleOrder([Pool("web", 300_000), Pool("notes", 51), Pool("code", 101)], 10, 3, [1, 1e-4, 7e-5])
    found = small()
    assert found.period == 2**17
    samples = 3 * found.period
    pool, epoch, sequence = found.locate(np.arange(samples))
    for index, share in enumerate(np.array([1, 1e-4, 7e-5]) / 1.00017):
        here = pool == index
        assert abs(here.sum() - share * samples) <= 3
        uses = np.bincount(sequence[here], minlength=found.counts[index])
        assert uses.max() - uses.min() <= 1
        assert found.epochs(samples)[found.pools[index].name] == here.sum() / found.counts[index]
        assert np.array_equal(np.sort(epoch[here]), np.arange(here.sum()) // found.counts[index])
    parts = np.concatenate([np.stack(small().locate(part)) for part in
                            np.array_split(np.arange(samples - 999, samples), 7)], axis=1)
    assert np.array_equal(parts, np.stack([pool, epoch, sequence])[:, -999:])


def test_a_longer_period_is_another_plan():
    found = order([1, 1e-4])
    assert found.period > PERIOD and found.plan_sha256 != sha256_json({
        "algorithm": ALGORITHM, "length": 10, "seed": 3, "shares": [1.0, 1e-4], "content": "x",
        "pools": [[pool.name, pool.tokens] for pool in found.pools]}), "that one has no sample of the second source"


def test_a_share_that_cannot_be_kept_is_refused_with_the_smallest_that_can():
    sources = [FilesSource(kind="files", name=name, paths=["x.txt"]) for name in ("web", "notes")]
    config = Config(shard=ShardConfig(sources=sources), train=TrainConfig(mixture={"web": 3.0, "notes": 1e-5}))
    said, = problems(config)
    assert "the source notes 3.33e-06 of the training sequences" in said and "7.63e-06 (1 in 131,072)" in said
    with pytest.raises(UserError, match=r"the source s1 3\.33e-06"):
        order([3, 1e-5])
    kept = TrainConfig(mixture={"web": 1.0, "notes": SMALLEST_SHARE * 1.001})
    assert problems(config.model_copy(update={"train": kept})) == [] and order(kept.mixture.values()).quotas[1] >= LEAST
