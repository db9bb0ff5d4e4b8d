"""The order over phases: that of one phase where there is one length, each token at most once an epoch whatever the
lengths, and a function of nothing but the sample number, the phases begun and what was left out before."""

from collections import defaultdict
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.config.phases import PhasePlan
from pipeline.config.training import TrainConfig
from pipeline.data.exclusion import Excluded
from pipeline.data.sampling.consumption import excesses, plan_lines, planned, train_tokens, trained_on
from pipeline.data.sampling.order import Pool, SampleOrder
from pipeline.data.sampling.phases import ANEW, PART, PhasedOrder
from pipeline.errors import UserError

NAMES = ("web", "code", "books")


def plan_of(phases, **train):
    return PhasePlan.of(TrainConfig.model_validate({"sequence_length": 16, "batch_tokens": 64, "phases": phases,
                                                    **train}))


def order_of(plan, tokens, seed=3):
    return PhasedOrder([Pool(name, count) for name, count in zip(NAMES, tokens, strict=False)], plan, seed, "content")


def uses(order, samples):
    """How often each token of each pool came in each epoch."""
    seen = defaultdict(lambda: np.zeros(max(pool.tokens for pool in order.pools) + 1, dtype=np.int64))
    for pool, epoch, start, length in zip(*order.locate(samples), strict=True):
        assert start >= 0 and start + length + 1 <= order.pools[pool].tokens  # a label for its last token
        seen[int(pool), int(epoch)][start:start + length] += 1
    return seen


@st.composite
def plans(draw, lengths=(8, 16, 32), least=1):
    """Phases of random lengths, batches, mixtures and ends."""
    phases, until = [], 0
    for _ in range(draw(st.integers(least, 4))):
        length = draw(st.sampled_from(lengths))
        batch = length * draw(st.integers(1, 6))
        until = -(-until // 1) + batch * draw(st.integers(1, 25)) - draw(st.integers(0, batch - 1))
        mixture = draw(st.one_of(st.none(), st.fixed_dictionaries({name: st.integers(0, 5) for name in NAMES}).filter(
            lambda shares: sum(shares.values()) > 0)))
        done = PhasePlan.of(TrainConfig.model_validate({"phases": phases})).tokens if phases else 0
        phases.append({"until": max(until, done + 1), "sequence_length": length, "batch_tokens": batch,
                       "mixture": mixture})
        until = phases[-1]["until"]
    return phases


TOKENS = st.tuples(*(st.integers(40, 3000) for _ in NAMES))


@given(tokens=st.integers(40, 5000), length=st.sampled_from([1, 7, 16]), seed=st.integers(0, 99),
       shares=st.tuples(st.integers(1, 9), st.integers(0, 9)), cut=st.integers(1, 60))
@settings(max_examples=40, deadline=None)
def test_one_phase_and_phases_that_differ_in_nothing_are_the_order_without_phases(tokens, length, seed, shares, cut):
    """One phase exactly; two of them but for where the pattern of sources begins: each source goes on where it was."""
    pools = [Pool("web", tokens), Pool("code", 3000)]
    plain = SampleOrder(pools, length, seed, [float(share) for share in shares])
    mixture = dict(zip(("web", "code"), shares, strict=True))
    train = {"sequence_length": length, "batch_tokens": 4 * length}
    one = PhasedOrder(pools, plan_of([{"until": 400 * length, "mixture": mixture}], **train), seed)
    two = PhasedOrder(pools, plan_of([{"until": 4 * cut * length, "mixture": mixture},
                                      {"until": 400 * length, "mixture": mixture}], **train), seed)
    numbers = np.arange(400)
    pool, epoch, sequence = plain.locate(numbers)
    found, again = one.locate(numbers), two.locate(numbers)
    assert np.array_equal(found.pool, pool) and np.array_equal(found.epoch, epoch)
    assert np.array_equal(found.start, sequence * length) and set(found.length) == {length}
    for source in range(2):
        ours = again.pool == source
        drawn = min(ours.sum(), (pool == source).sum())
        assert np.array_equal(again.start[ours][:drawn], (sequence * length)[pool == source][:drawn])
        assert abs(int(ours.sum()) - int((pool == source).sum())) <= 1 + cut * 4  # the second begins its own pattern


@given(phases=plans(), tokens=TOKENS, seed=st.integers(0, 5))
@settings(max_examples=60, deadline=None)
def test_no_token_comes_twice_in_an_epoch_over_phases_of_all_lengths(phases, tokens, seed):
    order = order_of(plan_of(phases), tokens, seed)
    assert order.end == order.plan.sequences_between(0, order.plan.steps)
    for used in uses(order, np.arange(order.end)).values():
        assert used.max() <= 1
    taken = [sum(phase.values()) for phase in order.consumed(order.end)]
    assert taken == [phase.tokens for phase in order.plan.phases]


@given(phases=plans(lengths=(16,)), tokens=TOKENS)
@settings(max_examples=30, deadline=None)
def test_with_one_length_an_epoch_is_whole_before_the_next_begins(phases, tokens):
    order = order_of(plan_of(phases), tokens)
    seen = uses(order, np.arange(order.end))
    for (pool, epoch), used in seen.items():
        if (pool, epoch + 1) in seen:
            assert used.sum() == (tokens[pool] - 1) // 16 * 16
    assert not any(any(phase.values()) for phase in order.passed_over())


@given(phases=plans(least=2), tokens=TOKENS, data=st.data())
@settings(max_examples=60, deadline=None)
def test_the_past_does_not_depend_on_what_is_to_come(phases, tokens, data):
    """Other phases to come, and another end of the one that has begun, move no sample before; the plan's hash says so.
    Something else in a phase that has begun changes the hash."""
    plan = plan_of(phases, grain_tokens=32)
    begun = data.draw(st.integers(0, len(phases) - 1))
    step = data.draw(st.integers(plan.phases[begun].first_step + 1, plan.phases[begun].end_step))
    samples = plan.sequences_between(0, step)
    later = data.draw(plans())
    longer = {**phases[begun], "until": phases[begun]["until"] + data.draw(st.integers(0, 999))}
    moved = [{**phase, "until": phase["until"] + longer["until"] + 200} for phase in later]
    other = order_of(plan_of([*phases[:begun], longer, *moved], grain_tokens=32), tokens)
    order = order_of(plan, tokens)
    numbers = np.arange(samples)
    assert all(np.array_equal(*both) for both in zip(order.locate(numbers), other.locate(numbers), strict=True))
    assert order.plan_at(samples) == other.plan_at(samples) and order.plan_sha256 == other.plan_sha256
    differs = {**phases[begun], "batch_tokens": 2 * phases[begun]["batch_tokens"]}
    changed = order_of(plan_of([*phases[:begun], differs], grain_tokens=32), tokens)
    assert changed.links[begun] != order.links[begun]
    if begun:
        assert changed.plan_at(changed.plan.sequences_between(0, plan.phases[begun].first_step)) == \
            order.links[begun - 1]


@given(phases=plans(), tokens=TOKENS, data=st.data())
@settings(max_examples=40, deadline=None)
def test_any_ranks_take_the_same_batches_also_after_rollbacks(phases, tokens, data):
    """Steps one after another, each dealt out to random ranks, with steps left out at random and a start anew after
    each: every sample once and in order, and nothing before a rollback moves."""
    order = order_of(plan_of(phases), tokens)
    plan, excluded, cursor, step, used = order.plan, Excluded(), 0, 0, []
    rollbacks = data.draw(st.lists(st.integers(1, plan.steps), max_size=3))
    while step < plan.steps:
        phase = plan.phase_of(step + 1)
        took = excluded.take(cursor, phase.sequences)
        if step + 1 in rollbacks:
            rollbacks.remove(step + 1)
            before = order.locate(np.arange(cursor))
            excluded = Excluded([*excluded.ranges, *took.ranges])
            order.leave_out(excluded)
            assert all(np.array_equal(*both) for both in zip(before, order.locate(np.arange(cursor)), strict=True))
            back = data.draw(st.integers(0, step))  # to a checkpoint, from which all is done again
            step, cursor, used = back, excluded.take(0, plan.sequences_between(0, back)).end, used[:back]
            continue
        ranks = data.draw(st.sampled_from([count for count in (1, 2, 3, 4) if phase.sequences % count == 0]))
        share = phase.sequences // ranks
        mine = np.concatenate([excluded.numbers(cursor, rank * share, share) for rank in range(ranks)])
        found = order.locate(mine)
        assert set(found.length.tolist()) == {phase.train.sequence_length}, "a batch lies within a phase"
        used.append(mine)
        step, cursor = step + 1, took.end
    every = np.concatenate(used)
    assert np.all(np.diff(every) > 0) and len(every) == plan.sequences_between(0, plan.steps)
    for count in uses(order, every).values():
        assert count.max() <= 1
    assert [sum(phase.values()) for phase in order.consumed(cursor)] == [phase.tokens for phase in plan.phases]
    assert sum(sum(phase.values()) for phase in order.left_out(cursor)) == sum(
        int(order.locate(np.arange(first, min(end, cursor))).length.sum()) for first, end in excluded.ranges
        if first < cursor)


def test_a_window_that_is_left_is_at_most_a_part_of_the_source_and_is_told():
    order = order_of(plan_of([{"until": 6400, "sequence_length": 16, "batch_tokens": 160},
                              {"until": 12800, "sequence_length": 64, "batch_tokens": 640}]), (50_001,))
    over, later = (phase["web"] for phase in order.passed_over())
    assert 0 < over <= 50_001 // PART + 64 and later == 0
    used = uses(order, np.arange(order.end))[0, 0]
    assert used.sum() == 12800  # nothing twice, though some was left


@pytest.mark.parametrize(("between", "last", "left"), [
    ({"mixture": {"web": 0, "code": 1}}, {"sequence_length": 16}, 0),
    ({"sequence_length": 24}, {"sequence_length": 16}, 0), ({"mixture": {"web": 0, "code": 1}}, {}, 1),
    ({}, {"sequence_length": 16}, 1)], ids=["not used", "read anew", "not used and then longer", "used"])
def test_what_a_later_phase_goes_on_with_is_not_left(between, last, left):
    """The source of a phase of short sequences, over one of others, in one after that."""
    mixture = {"web": 1, "code": 0}
    order = order_of(plan_of([
        {"until": 1600, "sequence_length": 16, "batch_tokens": 160, "mixture": mixture},
        {"until": 3520, "sequence_length": 64, "batch_tokens": 960, "mixture": mixture, **between},
        {"until": 6400, "sequence_length": 64, "batch_tokens": 960, "mixture": mixture, **last}],
        grain_tokens=64), (50_001, 50_001))
    over = order.passed_over()
    assert [0 < phase["web"] <= 50_001 // PART + 64 for phase in over] == [bool(left), False, False]
    assert not any(phase["code"] for phase in over)


def test_sequences_of_a_shorter_phase_are_shuffled_over_a_window():
    order = order_of(plan_of([{"until": 64_000, "sequence_length": 16, "batch_tokens": 160},
                              {"until": 128_000, "sequence_length": 64, "batch_tokens": 640}]), (500_001,))
    starts = order.locate(np.arange(4000)).start
    assert np.mean(np.abs(np.diff(starts)) == 16) < 0.01, "neighbours in the text are none in a batch"


def test_a_length_that_does_not_divide_the_grain_reads_anew():
    order = order_of(plan_of([{"until": 3200}, {"until": 6080, "sequence_length": 24, "batch_tokens": 240},
                              {"until": 12_000}], grain_tokens=16), (8001,))
    found = order.locate(np.arange(order.end))
    own = found.length == 24
    assert set(found.epoch[own]) == {2 * ANEW} and set(found.epoch[~own]) == {0, 1} - {1} | set(found.epoch[~own])
    rest = found.start[~own]
    assert len(set(rest[:500].tolist())) == 500, "the others go on where they were"
    assert order.epochs(order.end)["web"] == pytest.approx(sum(phase.tokens for phase in order.plan.phases) / 8001)


def test_faults_name_the_thing():
    phases = [{"until": 640, "mixture": {"web": 1, "code": 0}}, {"until": 1280, "mixture": {"web": 1, "code": 1}}]
    with pytest.raises(UserError, match=r"train.phases\[1\] takes sequences from code \(16\): so few"):
        order_of(plan_of(phases), (1000, 16))
    order_of(plan_of(phases), (1000, 17))
    with pytest.raises(UserError, match=r"train\.mixture gives the source code 1e-07"):
        order_of(plan_of([{"until": 640, "mixture": {"web": 1e7, "code": 1}}]), (1000, 1000))


def config_of(**train):
    from pipeline.config.data import FilesSource, ShardConfig
    from pipeline.config.tree import Config
    sources = [FilesSource(kind="files", name=name, paths=["x"]) for name in NAMES]
    return Config(shard=ShardConfig(sources=sources), train=TrainConfig.model_validate(
        {"sequence_length": 16, "batch_tokens": 160, **train}))


COUNTS = {"splits": {"train": {"web": {"tokens": 40_001}, "code": {"tokens": 4001}, "books": {"tokens": 801}}}}


@pytest.mark.parametrize("train", [
    {"steps": 90, "mixture": {"web": 3, "code": 1, "books": 0}}, {"steps": 90},
    {"phases": [{"until": 6400}, {"until": 14_400, "sequence_length": 32, "mixture": {"web": 0, "code": 3,
                                                                                     "books": 1}}]}])
def test_what_is_planned_is_what_the_order_gives(train):
    config = config_of(**train)
    tokens = train_tokens(config, COUNTS)
    found = planned(config, tokens)
    assert sum(sum(phase.values()) for phase in found.phases) == PhasePlan.of(config.train).tokens
    if not config.train.phases and config.train.mixture is None:
        assert found.phases == ({"all sources": 14_400},)
        return
    if config.train.phases:
        order = PhasedOrder([Pool(*item) for item in tokens.items()], PhasePlan.of(config.train), config.seed)
        pools, _, _, lengths = order.locate(np.arange(order.end))
    else:
        order = SampleOrder([Pool(*item) for item in tokens.items()], 16, config.seed, [3.0, 1.0, 0.0])
        pools, lengths = order.locate(np.arange(900))[0], np.full(900, 16)
    for number, name in enumerate(NAMES):
        assert found.tokens(name) == lengths[pools == number].sum()


@given(tokens=TOKENS, samples=st.integers(0, 900), ranges=st.lists(st.tuples(
    st.integers(0, 1000), st.integers(0, 60)), max_size=3), mixed=st.booleans())
@settings(max_examples=30, deadline=None)
def test_what_rollbacks_left_out_was_not_trained_on(tokens, samples, ranges, mixed):
    pools = [Pool(*item) for item in zip(NAMES, tokens, strict=True)] if mixed else [Pool("all", sum(tokens))]
    order = SampleOrder(pools, 16, 3, [3.0, 1.0, 2.0] if mixed else None)
    excluded = Excluded([(first, first + count) for first, count in ranges])
    found = trained_on(order, samples, excluded)
    used = order.locate(excluded.numbers(0, 0, 1000))
    used = [part[:sum(end - first for first, end in excluded.outside(0, samples))] for part in used]
    left = [part[[any(a <= number < b for a, b in excluded.ranges) for number in range(samples)]]
            for part in order.locate(np.arange(samples))]
    for number, pool in enumerate(pools):
        assert found["epochs"][pool.name] == pytest.approx((used[0] == number).sum() / order.counts[number])
        assert found.get("left_out", {}).get(pool.name, 0) == 16 * (left[0] == number).sum()
    assert ("left_out" in found) == bool(excluded.within(0, samples))


def test_limits_and_what_is_said():
    phases = [{"until": 6400}, {"until": 14_400, "mixture": {"web": 1, "code": 1, "books": 1}}]
    config = config_of(phases=phases, max_epochs={"books": 2, "web": 0.1})
    found = planned(config, train_tokens(config, COUNTS))
    beyond = excesses(config.train, found)
    assert len(beyond) == 2 and beyond[0].startswith("train.max_epochs allows 0.1 of web, and the plan takes 0.2")
    assert beyond[1].startswith("train.max_epochs allows 2 of books, and the plan takes 2.")
    assert not excesses(config_of(phases=phases, max_epochs=4).train, found)
    freely = config_of(phases=[*phases, {"until": 20_000, "mixture": {"web": 0, "code": 0, "books": 1}}])
    said = plan_lines(freely.train, planned(freely, train_tokens(freely, COUNTS)))
    assert "phase 3: steps 91 to 125, 5.6k tokens, 10 sequences of 16 a step" in said
    assert "  books: 5.6k tokens (100%) of 801, 6.99 epochs, 9.85 so far" in said
    assert said[-1].startswith("  books is gone through 9.8 times, and beyond 4 the same text helps little")
    together = config_of(steps=300, max_epochs={"books": 1})
    assert "allows 1 of books, and the plan takes 1.07 (48k of 44.8k tokens of all sources)" in excesses(
        together.train, planned(together, train_tokens(together, COUNTS)))[0]


def test_the_shuffle_of_a_phase_is_not_that_of_the_next():
    order = order_of(plan_of([{"until": 3200, "sequence_length": 8}, {"until": 6400, "sequence_length": 16},
                              {"until": 9600, "sequence_length": 8}, {"until": 12_800, "sequence_length": 16}]),
                     (40_001,))
    found = order.locate(np.arange(order.end))
    first, third = (found.start[begin:begin + 300] for begin in (0, 600))
    assert not np.array_equal(first - first.min(), third - third.min())
    assert all(before < after for before, after in pairwise(order._laid_out[1].tolist()))


@given(phases=plans(lengths=(8, 12, 16, 32)), tokens=TOKENS, seed=st.integers(0, 5), data=st.data())
@settings(max_examples=60, deadline=None)
def test_each_sequence_has_the_samples_that_locate_gives(phases, tokens, seed, data):
    """Backwards: over phases that go on, change the length or read anew, around what is left out, up to any sample."""
    order = order_of(plan_of(phases), tokens, seed)
    firsts = data.draw(st.lists(st.integers(0, order.end), max_size=3))
    order.leave_out(Excluded((first, first + data.draw(st.integers(1, 9))) for first in firsts))
    below = data.draw(st.one_of(st.integers(0, order.end + 50), st.just(order.end)))
    found = order.locate(np.arange(below))
    for pool in range(len(NAMES)):
        for length in sorted({phase.train.sequence_length for phase in order.plan.phases}):
            count = max(1, tokens[pool] // length)
            asked = np.array(sorted(data.draw(st.sets(st.integers(0, count - 1), max_size=8))), np.int64)
            samples, sequences = order.inverse(pool, length, asked, below)
            wanted = np.flatnonzero((found.pool == pool) & (found.length == length)
                                    & np.isin(found.start, asked * length))
            assert samples.tolist() == wanted.tolist()
            assert (sequences * length).tolist() == found.start[wanted].tolist()


def test_inverse_finds_every_sample_of_a_reading_that_is_left_and_taken_up_again():
    """Windows of many grains, begun and passed over; two phases that read anew at one length, with another between."""
    order = order_of(plan_of([{"until": 3000, "sequence_length": 8, "batch_tokens": 40}, {"until": 9000},
                              {"until": 12000, "sequence_length": 12, "batch_tokens": 60},
                              {"until": 15000, "sequence_length": 8, "batch_tokens": 40},
                              {"until": 40000, "sequence_length": 12, "batch_tokens": 60},
                              {"until": 60000, "sequence_length": 32}], mixture={"web": 2, "code": 1, "books": 1}),
                     (6000, 2100, 900))
    order.leave_out(Excluded([(3, 50), (500, 505)]))
    found, seen = order.locate(np.arange(order.end)), []
    assert found.epoch.max() > 3 * ANEW and order.passed_over()[0]["web"] > 0
    for pool in range(3):
        for length in (8, 12, 16, 32):
            everything = np.arange(order.pools[pool].tokens // length)
            samples, sequences = order.inverse(pool, length, everything, order.end)
            assert (sequences * length).tolist() == found.start[samples].tolist()
            assert set(found.pool[samples]) <= {pool} and set(found.length[samples]) <= {length}
            seen += samples.tolist()
    assert sorted(seen) == list(range(order.end))


def test_what_was_used_is_found_while_phases_are_laid_out_anew(monkeypatch):
    """A rollback lays them out anew while threads beside the loader ask where samples come from."""
    order, used = order_of(plan_of([{"until": 640}, {"until": 1280, "batch_tokens": 128}]), (900, 500, 400)), \
        np.arange(40)
    before, seen, reading = order.locate(used), [], order._reading

    def asked(*given):
        seen.append(order.locate(used))
        return reading(*given)
    monkeypatch.setattr(order, "_reading", asked)
    order.leave_out(Excluded(((44, 48),)))
    assert len(seen) == 6
    for found in [*seen, order.locate(used)]:
        assert all((one == other).all() for one, other in zip(found, before, strict=True))


@given(phases=plans())
@settings(max_examples=40, deadline=None)
def test_a_sequence_tells_its_step(phases):
    plan = plan_of(phases)
    for step in range(1, plan.steps + 4):
        first, end = plan.sequences_between(0, step - 1), plan.sequences_between(0, step)
        assert {plan.step_of(first), plan.step_of(end - 1)} == {step}
