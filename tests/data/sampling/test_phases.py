"""Orders over phases, of running text and of packed documents alike: that without phases where there is one, each token
at most once an epoch whatever the lengths, and a function of nothing but the sample number, the phases begun and what
was left out before. And what a change of the length leaves, and what a plan consumes."""

import hashlib
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drover.pipeline.core.errors import UserError
from drover.pipeline.data.exclusion import Excluded, sample_numbers
from drover.pipeline.data.sampling import packing
from drover.pipeline.data.sampling.consumption import (
    planned_by,
)
from drover.pipeline.data.sampling.order import PART, Order, Pool
from drover.pipeline.data.sampling.packing import read_plan
from drover.tools.audit import Audit, _sequences
from tests.data.sampling.phased import DOCUMENTS, EXCLUDED, plans, spans_of, times_read
from tests.refusal import refused, table
from tests.token_shards import SOURCES, assert_readings, plan_of, training_data, write_numbered

both = pytest.mark.parametrize("packed", [False, True], ids=["cut", "packed"])


@both
@given(documents=DOCUMENTS, length=st.sampled_from([1, 7, 16, 24]), shares=st.none() | st.tuples(
    st.integers(1, 9), st.integers(0, 9)))
@settings(max_examples=20)
def test_one_phase_is_the_order_without_phases(tmp_path_factory, packed, documents, length, shares):
    """Where sources are mixed. And a document's readings are the pieces that name it; packed, none is cut that fits."""
    folder, logged = tmp_path_factory.mktemp("shards"), []
    table, mixture = write_numbered(folder, documents), shares and dict(zip(SOURCES, shares, strict=True))
    plain = training_data(folder, table, length, mixture, packed)
    one = training_data(folder, table, packed=packed, said=logged, plan=plan_of(
        [{"until": 80 * length}], sequence_length=length, batch_tokens=4 * length, mixture=mixture))
    assert logged == [] and len(one.packings) == packed, "the packing is that of a training without phases"
    assert mixture is None or spans_of(one, np.arange(80)) == spans_of(plain, np.arange(80))
    assert (one.order.without_phases == plain.order.plan_sha256) == (mixture is not None)
    assert_readings(plain, 170)


@both
@given(documents=DOCUMENTS, phases=plans() | plans(lengths=(16,)), excluded=EXCLUDED, beyond=st.integers(-30, 30))
@settings(max_examples=40)
def test_no_token_comes_twice_in_an_epoch_over_phases_of_all_lengths(tmp_path_factory, packed, documents, phases,
                                                                    excluded, beyond):
    """And all of them come before the next epoch begins, where they are packed or there is one length. A document's
    readings are the pieces that name it."""
    folder = tmp_path_factory.mktemp("shards")
    data = training_data(folder, write_numbered(folder, documents), packed=packed, plan=plan_of(phases))
    data.leave_out(excluded)
    order, length = data.order, {phase["sequence_length"] for phase in phases}
    seen = times_read(data, np.arange(order.end))
    for (pool, epoch), shards in seen.items():
        assert max(tokens.max(initial=0) for tokens in shards.values()) <= 1
        if (pool, epoch + 1) in seen and (packed or length == {16}):
            tokens = order.pools[pool].tokens if packed else (order.pools[pool].tokens - 1) // 16 * 16
            assert sum(int(read.sum()) for read in shards.values()) == tokens
    for phase, wanted, (own, _, padding) in zip(phases, order.plan.phases, order.taken(order.end), strict=True):
        assert padding >= -2 if packed else padding == 0, "what is planned fits, but for rounding"
        assert sum(own.values()) + padding == wanted.tokens
        assert not any(own[name] for name, share in (phase["mixture"] or {}).items() if not share)
    if not packed and len(length) == 1:
        assert not any(any(phase.values()) for phase in order.left_at())
    assert_readings(data, max(0, order.end + beyond))


@pytest.mark.parametrize(("packed", "places"), [(False, "315cbcb09a4056b1"), (True, "bb750e5f94588327")])
def test_the_order_never_changes(tmp_path, monkeypatch, packed, places):
    """A change here orphans every run in progress: it needs a new VERSION."""
    monkeypatch.setattr(packing, "AT_ONCE", 7)
    documents = [[300, 5, 9, 700, 3, 12, 31], [70, 400, 8, 8, 50, 60], [3, 1000, 21, 300], [200, 20, 1]]
    phases = [{"until": 800, "sequence_length": 8, "mixture": {"web": 2, "code": 1}}, {"until": 1600},
              {"until": 2400, "sequence_length": 12, "batch_tokens": 48}, {"until": 6000, "sequence_length": 24,
                                                                            "batch_tokens": 72}]
    data = training_data(tmp_path, write_numbered(tmp_path, documents), packed=packed, plan=plan_of(phases))
    data.leave_out(Excluded([(30, 40), (150, 151)]))
    result = repr(spans_of(data, np.arange(data.order.end))).encode()
    assert hashlib.sha256(result).hexdigest()[:16] == places


@both
@given(documents=DOCUMENTS, phases=plans(least=2), later=plans(), data=st.data())
@settings(max_examples=25)
def test_the_past_does_not_depend_on_what_is_to_come(tmp_path_factory, packed, documents, phases, later, data):
    """Other phases to come, and another end of the one that has begun, move no sample before; the plan's hash says so.
    Something else in a phase that has begun changes the hash."""
    folder = tmp_path_factory.mktemp("shards")
    table, plan = write_numbered(folder, documents), plan_of(phases, grain_tokens=24)
    started = data.draw(st.integers(0, len(phases) - 1))
    step = data.draw(st.integers(plan.phases[started].first_step + 1, plan.phases[started].end_step))
    samples = plan.sequences_between(0, step)
    longer = {**phases[started], "until": phases[started]["until"] + data.draw(st.integers(0, 99))}
    moved = [{**phase, "until": phase["until"] + longer["until"] + 400} for phase in later]
    differs = {**phases[started], "batch_tokens": 2 * phases[started]["batch_tokens"]}
    one, other, changed = (training_data(folder, table, packed=packed, plan=plan_of(own, grain_tokens=24)) for own in (
        phases, [*phases[:started], longer, *moved], [*phases[:started], differs]))
    assert spans_of(one, np.arange(samples)) == spans_of(other, np.arange(samples))
    assert one.order.plan_at(samples) == other.order.plan_at(samples)
    assert one.order.plan_sha256 == other.order.plan_sha256
    assert changed.order.links[started] != one.order.links[started] == one.order.plan_at(samples)
    if started:
        before = plan.sequences_between(0, plan.phases[started].first_step)
        assert changed.order.plan_at(before) == one.order.links[started - 1]


@both
@given(documents=DOCUMENTS, phases=plans(), data=st.data())
@settings(max_examples=25)
def test_batches_are_the_same_after_rollbacks_and_restarts(tmp_path_factory, packed, documents, phases, data):
    """Steps one after another, any of them by a new process, and rollbacks at random: nothing before a rollback moves.
    test_exclusion.py splits a step between ranks."""
    folder = tmp_path_factory.mktemp("shards")
    table, plan = write_numbered(folder, documents), plan_of(phases)
    result = training_data(folder, table, packed=packed, plan=plan)
    excluded, cursor, step = Excluded(), 0, 0
    result.leave_out(excluded)
    rollbacks = data.draw(st.lists(st.integers(1, plan.steps), max_size=3))
    while step < plan.steps:
        phase = plan.phase_of(step + 1)
        took = excluded.take(cursor, phase.sequences)
        if step + 1 in rollbacks:
            rollbacks.remove(step + 1)
            before = spans_of(result, np.arange(cursor))
            excluded = Excluded([*excluded.ranges, *took.ranges])
            result.leave_out(excluded)
            assert spans_of(result, np.arange(cursor)) == before
            back = data.draw(st.integers(0, step))  # to a checkpoint, from which all is done again
            step, cursor = back, excluded.take(0, plan.sequences_between(0, back)).end
            continue
        if data.draw(st.booleans()):  # killed, and started again
            fresh = training_data(folder, table, packed=packed, plan=plan,
                                  planner=lambda packing: read_plan(packing, pytest.fail))
            fresh.leave_out(excluded)
            coming = np.arange(cursor, took.end)
            assert fresh.order.plan_at(took.end) == result.order.plan_at(took.end)
            assert spans_of(fresh, coming) == spans_of(result, coming)
        samples = sample_numbers(took.ranges)
        assert {sequences.length for sequences, _ in result.located(samples)} == {phase.train.sequence_length}
        step, cursor = step + 1, took.end
    assert result.order.end == cursor


SOME = [[30, 5, 9, 70, 3, 12, 31], [7, 40, 8, 8, 50, 60], [3, 100, 21, 300], [20, 20, 1]]
"""Documents of two shards of each source."""
RAMP = [{"until": 160, "batch_tokens": 32}, {"until": 400, "sequence_length": 40, "batch_tokens": 80},
        {"until": 560, "sequence_length": 16, "batch_tokens": 32}]


def ramp(folder, **options):
    return training_data(folder, write_numbered(folder, SOME), packed=True, plan=plan_of(RAMP, packing="best_fit"),
                         **options)


def test_what_is_left_where_the_length_changes_is_counted_to_the_token(tmp_path):
    data = ramp(tmp_path)
    order = data.order
    read = {pool: sum(int(tokens.sum()) for tokens in shards.values())
            for (pool, _), shards in times_read(data, np.arange(10)).items()}
    first, second, third = order.left_at()
    assert first == dict.fromkeys(SOURCES, 0) and all(third.values())
    assert second == {name: order.pools[pool].tokens - read[pool] for pool, name in enumerate(SOURCES)}
    padding = sum(data.batch_of(np.arange(10)).padding)
    assert abs(planned_by(order).padding[0] - padding) < 40, "by the mean of the sequences"
    epochs = order.epochs(order.end)
    assert sum(epochs[pool.name] * pool.tokens for pool in order.pools) == pytest.approx(
        560 - sum(phase.padding for phase in order.taken(order.end)))


def test_a_rollback_has_only_what_comes_after_planned_again(tmp_path):
    logged = []
    data = ramp(tmp_path, said=logged)
    data.leave_out(Excluded())
    assert len(logged) == 6 and logged[0].startswith("planned the best-fit packing of 4 of 4 token shards")
    assert "of 2 of 2 token shards in sequences of 40" in logged[2]
    data.leave_out(Excluded([(8, 10)]))
    assert 6 < (before := len(logged)) <= 10
    data.leave_out(Excluded([(8, 10), (13, 15)]))
    assert before < len(logged) <= before + 2, "the second change of length comes after it, the first before"
    del logged[:]
    data.leave_out(Excluded())
    assert logged == [], "what was planned is known"


def faults(data, *ranges):
    """What the audit says of the samples of these ranges."""
    result = Audit()
    _sequences(data, ranges, result)
    return result.faults


def test_the_audit_finds_a_sequence_and_a_token_that_came_twice(tmp_path):
    data = ramp(tmp_path)
    end = data.order.end
    assert faults(data, (0, end)) == []
    [twice] = faults(data, (0, end), (3, 4))
    assert ", of 16 tokens, came 2 times in epoch 0" in twice
    # What was left where the length changed first is thought to be everything.
    data.spaces[2:4] = [data.spaces[1]] * 2
    wrong = faults(data, (0, end))
    assert wrong and all("came twice in epoch 0" in fault for fault in wrong)


NAMES = ("web", "code", "books")


def order_of(phases, *tokens, **train):
    return Order([Pool(name, count) for name, count in zip(NAMES, tokens, strict=False)],
                 plan_of(phases, **train), 3, "content")


@pytest.mark.parametrize(("between", "last", "left"), table("""
    {"mixture": {"web": 0, "code": 1}} -> {"sequence_length": 16} -> null
    {"mixture": {"web": 0, "code": 1}} -> {"sequence_length": 64} -> 2
    {"sequence_length": 24} -> {"sequence_length": 16} -> null
    {"sequence_length": 64} -> {"sequence_length": 16} -> 1""", json.loads, json.loads, json.loads))
def test_a_window_is_left_where_no_later_phase_goes_on_with_it(between, last, left):
    """The source of a phase of short sequences, over one that does not use it, reads it anew or goes on with it, in one
    after that. At most a part of it is left, and told."""
    mixture = {"web": 1, "code": 0}
    order = order_of([
        {"until": 1600, "sequence_length": 16, "batch_tokens": 160, "mixture": mixture},
        {"until": 3520, "sequence_length": 64, "batch_tokens": 960, "mixture": mixture, **between},
        {"until": 6400, "sequence_length": 64, "batch_tokens": 960, "mixture": mixture, **last}], 50_001, 50_001,
        grain_tokens=64)
    over = order.left_at()
    assert [0 < phase["web"] <= 50_001 // PART + 64 for phase in over] == [number == left for number in range(3)]
    assert not any(phase["code"] for phase in over)
    assert left is None or over[left]["web"] == 50_001 // 64 // PART * 64 - 1600


def test_faults_name_the_thing():
    phases = [{"until": 640, "mixture": {"web": 1, "code": 0}}, {"until": 1280, "mixture": {"web": 1, "code": 1}}]
    refused(UserError, r"train.phases\[1\] takes sequences from code \(16\): so few", order_of, phases, 1000, 16)
    order_of(phases, 1000, 17)
    refused(UserError, r"train takes sequences from code \(16\): .* one of 16 and a label. Give more text",
            order_of, [], 1000, 16, mixture={"web": 1, "code": 1})
    refused(UserError, r"train.phases\[0\] takes sequences from code \(12\): .* one of 16", order_of,
            [{"until": 640, "sequence_length": 8}, {"until": 1280}], 1000, 12)
    refused(UserError, r"without a mixture .* and code has 1e-09; .* Give each phase a mixture", order_of,
            [{"until": 640}], 10**12, 1000)


def test_used_samples_keep_their_places_while_phases_are_laid_out_again(monkeypatch):
    """A rollback lays them out anew while threads beside the loader ask where samples come from."""
    order, used = order_of([{"until": 640}, {"until": 1280, "sequence_length": 32}], 900, 500, 400), np.arange(40)
    before, seen, continued = order.locate(used), [], order.space.continued

    def wanted(*given):
        seen.append(order.locate(used))
        return continued(*given)
    monkeypatch.setattr(order.space, "continued", wanted)
    order.leave_out(Excluded(((44, 48),)))
    assert len(seen) == 3 and all(np.array_equal(result, before) for result in [*seen, order.locate(used)])
