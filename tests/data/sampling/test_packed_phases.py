"""The order over phases of packed documents: that without phases where there is one, each token exactly once an epoch
whatever the lengths, and a function of nothing but the sample number, the phases begun and what was left out before."""

from __future__ import annotations

import os
import pickle
import re
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.config.data import FilesSource, ShardConfig
from pipeline.config.phases import PhasePlan
from pipeline.config.training import TrainConfig
from pipeline.config.tree import Config
from pipeline.data.exclusion import Excluded, sample_numbers
from pipeline.data.provenance import pieces, readings
from pipeline.data.sampling.batch import IGNORED
from pipeline.data.sampling.consumption import plan_lines, planned_by
from pipeline.data.sampling.packed_data import PackedData, PhasePackings, lengths_of
from pipeline.data.sampling.packing_plan import INDEX, Alone, Planning, make, read
from pipeline.data.shard_table import OpenShards, Shards
from pipeline.errors import UserError
from pipeline.training.data.opening import refuse_beyond
from tests.data.sampling.test_packing import SOURCES, data_of, make_shards
from tools.audit import Audit, _packed_sequences


@pytest.fixture(scope="module", autouse=True)
def without_waiting_for_the_disk():
    """Many small files, and no power cut."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda file: None)
        yield


SOME = [[30, 5, 9, 70, 3, 12, 31], [7, 40, 8, 8, 50, 60], [3, 100, 21, 300], [20, 20, 1]]
"""Documents of two shards of each source."""


def plan_of(phases, **train):
    return PhasePlan.of(TrainConfig.model_validate({
        "sequence_length": 16, "batch_tokens": 64, "packing": "best_fit", "phases": phases, **train}))


def packed(folder, table, plan, seed=3, planner=None, said=None):
    """The data of a plan, its packings planned by one process alone unless `planner` does it."""
    opened = OpenShards(folder, table)
    shards = {source: Shards(opened, table.rows("train", source)) for source in SOURCES}
    planner = planner or (lambda planning: make(planning, Alone(), [].append if said is None else said.append))
    packings = PhasePackings(folder / "packing", shards, lengths_of(plan), planner)
    return PackedData(packings, plan, seed, table.content("train"), 60_000)


@st.composite
def plans(draw, lengths=(8, 16, 24, 40), least=1):
    """Phases of random lengths, batches, mixtures and ends."""
    phases, until = [], 0
    for _ in range(draw(st.integers(least, 4))):
        length = draw(st.sampled_from(lengths))
        batch = length * draw(st.integers(1, 5))
        until += batch * draw(st.integers(1, 9))
        mixture = draw(st.one_of(st.none(), st.fixed_dictionaries({name: st.integers(0, 4) for name in SOURCES}).filter(
            lambda shares: sum(shares.values()) > 0)))
        phases.append({"until": until, "sequence_length": length, "batch_tokens": batch, "mixture": mixture})
        until = plan_of(phases).tokens
    return phases


DOCUMENTS = st.lists(st.lists(st.integers(0, 90), min_size=1, max_size=12), min_size=2, max_size=4).filter(
    lambda shards: sum(map(sum, shards[::2])) and sum(map(sum, shards[1::2])))
EXCLUDED = st.lists(st.tuples(st.integers(0, 80), st.integers(1, 9)), max_size=3).map(
    lambda parts: Excluded((first, first + count) for first, count in parts))


def covered(data, below):
    """How often each token of each shard is read in each epoch, by source."""
    located, seen = data.order.locate(np.arange(below)), {}
    for pool, epoch, plan, sequence in zip(*(part.tolist() for part in located), strict=True):
        for span in data.bins(plan, pool).spans(sequence):
            tokens = seen.setdefault((pool, epoch), {}).setdefault(
                span.shard.path, np.zeros(span.shard.token_count, np.int64))
            tokens[span.start:span.stop] += 1
    return seen


@given(documents=DOCUMENTS, length=st.sampled_from([1, 7, 16]), seed=st.integers(0, 9),
       shares=st.tuples(st.integers(1, 9), st.integers(0, 9)), cut=st.integers(1, 9))
@settings(max_examples=20, deadline=None)
def test_one_phase_and_phases_that_differ_in_nothing_are_the_packing_without_phases(tmp_path_factory, documents, length,
                                                                                   seed, shares, cut):
    """One phase to the bit; two of them but for where the pattern of sources begins."""
    folder = tmp_path_factory.mktemp("shards")
    table, mixture = make_shards(folder, documents), dict(zip(SOURCES, shares, strict=True))
    packing = make(Planning.whole(folder / f"packing/{length}", OpenShards(folder, table), length), Alone(), [].append)
    plain = data_of(folder, table, packing, mixture)
    train = {"sequence_length": length, "batch_tokens": 4 * length, "mixture": mixture}
    said = []
    one = packed(folder, table, plan_of([{"until": 80 * length}], **train), said=said)
    two = packed(folder, table, plan_of([{"until": 4 * cut * length}, {"until": 80 * length}], **train), said=said)
    assert said == [] and len(two.packings) == 1, "the plan is that of a training without phases"
    numbers = np.arange(80)
    pool, epoch, sequence = plain.order.locate(numbers)
    found = one.order.locate(numbers)
    assert np.array_equal(found.pool, pool) and np.array_equal(found.epoch, epoch)
    assert np.array_equal(found.sequence, sequence) and not found.plan.any()
    ours, theirs = one.batch_of(numbers), plain.batch_of(numbers)
    for name in ("tokens", "labels", "documents", "positions"):
        assert bool((getattr(ours, name) == getattr(theirs, name)).all())
    assert (ours.lengths, ours.padding, ours.targets) == (theirs.lengths, theirs.padding, theirs.targets)
    again = two.order.locate(numbers)
    for source in range(2):
        mine, its = again.sequence[again.pool == source], sequence[pool == source]
        drawn = min(len(mine), len(its))
        assert np.array_equal(mine[:drawn], its[:drawn])


@given(documents=DOCUMENTS, phases=plans(), excluded=EXCLUDED)
@settings(max_examples=30, deadline=None)
def test_every_token_comes_exactly_once_an_epoch_over_phases_of_all_lengths(tmp_path_factory, documents, phases,
                                                                           excluded):
    folder = tmp_path_factory.mktemp("shards")
    table = make_shards(folder, documents)
    data = packed(folder, table, plan_of(phases))
    data.leave_out(excluded)
    order = data.order
    seen = covered(data, order.end)
    for (pool, epoch), shards in seen.items():
        for path, tokens in shards.items():
            assert tokens.max(initial=0) <= 1, (pool, epoch, path)
        if (pool, epoch + 1) in seen:
            assert sum(int(tokens.sum()) for tokens in shards.values()) == order.pools[pool].tokens
        assert epoch == 0 or (pool, epoch - 1) in seen
    found = Audit()
    _packed_sequences(data, [(0, order.end)], found)
    assert found.faults == []
    slots = [phase.tokens for phase in order.plan.phases]
    taken = [sum(tokens.values()) for tokens in order.consumed(order.end)]
    assert [tokens + padding for tokens, padding in zip(taken, order.padding(order.end), strict=True)] == slots


@given(documents=DOCUMENTS, phases=plans(least=2))
@settings(max_examples=20, deadline=None)
def test_every_label_is_the_next_token_of_its_document(tmp_path_factory, documents, phases):
    """In an epoch each token is predicted at most once; of those that are not, each begins a document or a part that
    was cut off where the length changed."""
    folder = tmp_path_factory.mktemp("shards")
    table = make_shards(folder, documents)  # ids number the tokens of a shard
    data = packed(folder, table, plan_of(phases))
    begins = {table.path(row): set(np.cumsum([1, *documents[number]]).tolist())
              for number, row in enumerate(range(len(table)))}
    predicted, read, parts, used_plans = {}, {}, {}, {}
    located = data.order.locate(np.arange(data.order.end))
    for pool, epoch, plan, sequence in zip(*(part.tolist() for part in located), strict=True):
        bins = data.bins(plan, pool)
        row, spans = np.zeros(bins.length + 1, np.uint32), bins.spans(sequence)
        starts, used = bins.fill(sequence, row)
        [name] = {span.shard.record["path"] for span in spans}
        read.setdefault((name, epoch), set()).update(row[:used].tolist())
        parts.setdefault((name, epoch), set()).update(span.start + 1 for span in spans)
        used_plans.setdefault((name, epoch), set()).add(plan)
        for place in set(range(used)) - {start - 1 for start in starts.tolist()}:
            token = int(row[place + 1])
            assert token == row[place] + 1 and token not in begins[name]
            known = predicted.setdefault((name, epoch), set())
            assert token not in known
            known.add(token)
    for key, tokens in read.items():
        lost = {token for token in tokens if token - 1 in tokens} - predicted.get(key, set()) - begins[key[0]]
        assert lost <= parts[key] and (len(used_plans[key]) > 1 or not lost)


@given(documents=DOCUMENTS, phases=plans(least=2), later=plans(), data=st.data())
@settings(max_examples=20, deadline=None)
def test_the_past_does_not_depend_on_what_is_to_come(tmp_path_factory, documents, phases, later, data):
    folder = tmp_path_factory.mktemp("shards")
    table, plan = make_shards(folder, documents), plan_of(phases)
    begun = data.draw(st.integers(0, len(phases) - 1))
    step = data.draw(st.integers(plan.phases[begun].first_step + 1, plan.phases[begun].end_step))
    samples = plan.sequences_between(0, step)
    longer = {**phases[begun], "until": phases[begun]["until"] + data.draw(st.integers(0, 99))}
    moved = [{**phase, "until": phase["until"] + longer["until"] + 200} for phase in later]
    order = packed(folder, table, plan).order
    other = packed(folder, table, plan_of([*phases[:begun], longer, *moved])).order
    ours, theirs = (one.locate(np.arange(samples)) for one in (order, other))
    for name in ("pool", "epoch", "sequence"):  # plans have other numbers
        assert np.array_equal(getattr(ours, name), getattr(theirs, name))
    assert order.plan_at(samples) == other.plan_at(samples) and order.plan_sha256 == other.plan_sha256
    differs = {**phases[begun], "batch_tokens": 2 * phases[begun]["batch_tokens"]}
    assert packed(folder, table, plan_of([*phases[:begun], differs])).order.links[begun] != order.links[begun]


@given(documents=DOCUMENTS, phases=plans(), data=st.data())
@settings(max_examples=15, deadline=None)
def test_any_ranks_take_the_same_batches_also_after_rollbacks_and_restarts(tmp_path_factory, documents, phases, data):
    """Steps one after another, each dealt out to random ranks that may all be new processes, with steps left out at
    random and a start anew after each: every sample once and in order, and nothing before a rollback moves."""
    folder = tmp_path_factory.mktemp("shards")
    table, plan = make_shards(folder, documents), plan_of(phases)
    found, excluded, cursor, step, used = packed(folder, table, plan), Excluded(), 0, 0, []
    found.leave_out(excluded)
    rollbacks = data.draw(st.lists(st.integers(1, plan.steps), max_size=2))
    while step < plan.steps:
        phase = plan.phase_of(step + 1)
        took = excluded.take(cursor, phase.sequences)
        if step + 1 in rollbacks:
            rollbacks.remove(step + 1)
            before = found.order.locate(np.arange(cursor))
            excluded = Excluded([*excluded.ranges, *took.ranges])
            found.leave_out(excluded)
            after = found.order.locate(np.arange(cursor))
            assert all(np.array_equal(*both) for both in zip(before, after, strict=True))
            back = data.draw(st.integers(0, step))
            step, cursor, used = back, excluded.take(0, plan.sequences_between(0, back)).end, used[:back]
            continue
        if data.draw(st.booleans()):  # killed, and started again
            fresh = packed(folder, table, plan, planner=lambda planning: read(planning, pytest.fail))
            fresh.leave_out(excluded)
            assert fresh.plan_at(took.end) == found.plan_at(took.end)
            for ours, theirs in zip(fresh.located(np.arange(cursor, took.end)),
                                    found.located(np.arange(cursor, took.end)), strict=True):
                assert ours[1] == theirs[1] and ours[0].length == theirs[0].length
                assert [span[1:] for span in ours[0].spans(ours[1])] == [span[1:] for span in theirs[0].spans(
                    theirs[1])]
        ranks = data.draw(st.sampled_from([count for count in (1, 2, 3, 4) if phase.sequences % count == 0]))
        share = phase.sequences // ranks
        mine = np.concatenate([excluded.numbers(cursor, rank * share, share) for rank in range(ranks)])
        assert {stream.length for stream, _ in found.located(mine)} == {phase.train.sequence_length}
        used.append(mine)
        step, cursor = step + 1, took.end
    every = np.concatenate(used)
    assert np.all(np.diff(every) > 0) and len(every) == plan.sequences_between(0, plan.steps)
    assert not np.isin(every, sample_numbers(excluded.ranges)).any()
    for shards in covered(found, cursor).values():
        assert max(tokens.max(initial=0) for tokens in shards.values()) <= 1


@given(documents=DOCUMENTS, phases=plans(least=2), excluded=EXCLUDED)
@settings(max_examples=20, deadline=None)
def test_a_documents_readings_are_the_pieces_that_name_it(tmp_path_factory, documents, phases, excluded):
    folder = tmp_path_factory.mktemp("shards")
    data = packed(folder, make_shards(folder, documents), plan_of(phases))
    data.leave_out(excluded)
    below, seen = data.order.end, {}
    epochs = data.order.locate(np.arange(below)).epoch
    for piece in pieces(data, np.arange(below)):
        seen.setdefault((piece.shard.path, piece.document), []).append(
            (piece.sample, int(epochs[piece.sample]), piece.start, piece.stop))
    for pool, stream in enumerate(data.streams):
        for index, shard in enumerate(stream.shards):
            for document in range(shard.documents):
                found = readings(data, pool, index, document, below)
                assert [(one.sample, one.epoch, one.start, one.stop) for one in found] == \
                    seen.pop((shard.path, document), [])
    assert not seen


RAMP = [{"until": 160, "batch_tokens": 32}, {"until": 400, "sequence_length": 40, "batch_tokens": 80},
        {"until": 560, "sequence_length": 16, "batch_tokens": 32}]


def test_what_is_left_where_the_length_changes_is_told_to_the_token(tmp_path):
    data = packed(tmp_path, make_shards(tmp_path, SOME), plan_of(RAMP))
    order = data.order
    read = {pool: sum(int(tokens.sum()) for tokens in shards.values())
            for (pool, _), shards in covered(data, plan_of(RAMP[:1]).sequences_between(0, 5)).items()}
    assert order.carried() == [{"web": 0, "code": 0}, {
        name: order.pools[pool].tokens - read[pool] for pool, name in enumerate(SOURCES)}, order.carried()[2]]
    assert all(order.carried()[2].values())
    found = planned_by(order)
    said = plan_lines(TrainConfig(packing="best_fit", phases=RAMP, sequence_length=16, batch_tokens=64), found)
    assert re.search(r"  of web the epoch has \d+ tokens left where the length changes: they come first, packed anew",
                     "\n".join(said))
    assert sum(text.startswith("  padding: ") for text in said) == 3
    batch, padding = data.batch(0, 10), 0
    padding = sum(batch.padding)
    assert abs(found.padding[0] - padding) < 40, "planned by the mean of the sequences"
    assert batch.targets == int((batch.labels != IGNORED).sum())


def test_more_epochs_than_allowed_are_refused(tmp_path):
    """Tokens over all phases, whatever was left where the length changed."""
    data = packed(tmp_path, make_shards(tmp_path, SOME), plan_of(RAMP))
    epochs, said = data.order.epochs(data.order.end), []
    assert sum(epochs[pool.name] * pool.tokens for pool in data.order.pools) == pytest.approx(
        560 - sum(data.order.padding(data.order.end)))
    sources = [FilesSource(kind="files", name=name, paths=["x"]) for name in SOURCES]

    def config(limit):
        return Config(shard=ShardConfig(sources=sources), train=TrainConfig(
            packing="best_fit", phases=RAMP, sequence_length=16, batch_tokens=64, max_epochs={"code": limit}))
    with pytest.raises(UserError, match=rf"allows {epochs['code'] - 0.1:g} of code, and the plan takes "):
        refuse_beyond(config(epochs["code"] - 0.1), {}, data, said.append)
    assert said[0].startswith("phase 1: steps 1 to 5, 160 tokens") and said[1].startswith("  web: ")
    refuse_beyond(config(epochs["code"] + 0.1), {}, data, said.append)


def test_a_rollback_has_only_what_comes_after_planned_again(tmp_path):
    said = []
    data = packed(tmp_path, make_shards(tmp_path, SOME), plan_of(RAMP), said=said)
    data.leave_out(Excluded())
    assert len(said) == 4 and said[0].startswith("planned the best-fit packing of 4 of 4 token shards")
    assert said[2].startswith("planned the best-fit packing in sequences of 40, of what an epoch has left where the "
                              "length changes, of 4 of 4 token shards: they were not planned before")
    first = data.order.locate(np.arange(10))
    data.leave_out(Excluded([(8, 10)]))
    assert len(said) == 6 and np.array_equal(data.order.locate(np.arange(10)), first)
    data.leave_out(Excluded([(8, 10), (13, 15)]))
    assert len(said) == 7, "the second change of length comes after it, the first before"
    data.leave_out(Excluded())
    assert len(said) == 7, "what was planned is known"


@pytest.mark.parametrize("damage", ["plan", "index"])
def test_a_damaged_plan_of_what_was_left_is_made_anew(tmp_path, damage):
    table, said = make_shards(tmp_path, SOME), []
    data = packed(tmp_path, table, plan_of(RAMP))
    data.leave_out(Excluded())
    files = {path: path.read_bytes() for path in (tmp_path / "packing").rglob("*") if path.is_file()}
    rest = data.packings[2]
    path = rest.path(0) if damage == "plan" else rest.folder / INDEX
    path.write_bytes(files[path][:-9])
    again = packed(tmp_path, table, plan_of(RAMP), said=said)
    again.leave_out(Excluded())
    [line] = said
    assert f"of {1 if damage == 'plan' else 4} of 4 token shards" in line
    assert files == {path: path.read_bytes() for path in (tmp_path / "packing").rglob("*") if path.is_file()}


def test_ranks_plan_together_what_one_plans_alone(tmp_path):
    table = make_shards(tmp_path, [*SOME, [9, 44], [1]])
    alone = packed(tmp_path, table, plan_of(RAMP))
    alone.leave_out(Excluded([(2, 4)]))
    barrier, boxes = threading.Barrier(3), [None] * 3
    (tmp_path / "packing").rename(tmp_path / "alone")

    class Together:
        def __init__(self, rank):
            self.rank, self.world = rank, 3

        def gather(self, value):
            boxes[self.rank] = value
            barrier.wait(60)
            found = pickle.loads(pickle.dumps(boxes))
            barrier.wait(60)
            return found

    def plan(rank):
        data = packed(tmp_path, table, plan_of(RAMP), planner=lambda planning: make(planning, Together(rank),
                                                                                     [].append))
        data.leave_out(Excluded([(2, 4)]))
        return data

    with ThreadPoolExecutor(3) as pool:
        made = list(pool.map(plan, range(3)))
    for data in made:
        assert len(data.packings) == len(alone.packings)
        for ours, theirs in zip(data.packings, alone.packings, strict=True):
            assert np.array_equal(ours.sha256, theirs.sha256) and np.array_equal(ours.numbers, theirs.numbers)
    folders = [{path.relative_to(tmp_path / name): path.read_bytes() for path in (tmp_path / name).rglob("*")
                if path.is_file()} for name in ("packing", "alone")]
    assert folders[0] == folders[1] and len(folders[0]) == 4 * (6 + 1)


def test_the_audit_finds_a_sequence_and_a_token_that_came_twice(tmp_path):
    data = packed(tmp_path, make_shards(tmp_path, SOME), plan_of(RAMP))
    end = plan_of(RAMP).sequences_between(0, data.order.plan.steps)
    proven, twice, wrong = Audit(), Audit(), Audit()
    _packed_sequences(data, [(0, end)], proven)
    _packed_sequences(data, [(0, end), (3, 4)], twice)
    assert proven.faults == [] and len(twice.faults) == 1 and "packed to 16, came 2 times in epoch 0" in twice.faults[0]
    _packed_sequences(_forgetful(data), [(0, end)], wrong)
    assert wrong.faults and all("came twice in epoch 0" in fault for fault in wrong.faults)


def _forgetful(data):
    """The same, but for what was left where the length changed first: that is thought to be everything."""
    bins, whole = data.bins, data._packings._whole[40]
    data.bins = lambda plan, pool: bins(whole if plan == 2 else plan, pool)
    return data
