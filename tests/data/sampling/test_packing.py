"""Documents packed by best fit: every token once, none cut without need; a plan that is found, remade or refused."""

from __future__ import annotations

import gc
import os

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.data.sampling.batch import IGNORED
from pipeline.data.sampling.packing_plan import INDEX, Planning, read
from pipeline.data.shard_table import OpenShards, ShardTable
from pipeline.errors import UserError
from pipeline.files import read_json, write_json
from tests.data.sampling.phased import DOCUMENTS, by_three_ranks, contents, planned, read_packed
from tests.token_shards import SOURCES, assert_same_batches, training_data, write_numbered
from tools.audit import Audit, _sequences

FEW = [[30, 5, 9, 16, 3], [7, 40], [3]]


def packed_data(folder, lengths, mixture=None, length=16):
    table = write_numbered(folder, lengths)
    return training_data(folder, table, mixture=mixture, packing=planned(folder, table, length)[0])


@given(documents=DOCUMENTS, length=st.integers(1, 24), mixed=st.booleans())
@settings(max_examples=40, deadline=None)
def test_every_token_once_an_epoch_and_no_document_cut_that_fits(tmp_path_factory, documents, length, mixed):
    """Of every sequence: what is read, which shard it is of, and where its labels lie."""
    folder = tmp_path_factory.mktemp("shards")
    data = packed_data(folder, documents, dict.fromkeys(SOURCES, 1.0) if mixed else None, length)
    read, table = {}, data.streams[0].shards.opened.table
    for stream, count in zip(data.streams, data.order.counts.tolist(), strict=True):
        for number in range(count):
            shard, spans, tokens, _ = read_packed(stream, number)
            assert [table.path(row) for row in stream.rows(np.array([number]))] == [shard.record["path"]]
            read.setdefault(shard, []).extend(tokens)
            for span in spans:
                begin, end = shard.document_span(shard.document_at(span.start))
                assert span.stop - span.start == min(length, end - span.start)
                assert (span.start - begin) % length == 0, "cut, though it fits"
    for shard, tokens in read.items():
        assert sorted(tokens) == list(range(1, shard.token_count + 1))
    assert sum(map(len, read.values())) == sum(map(sum, documents))


def test_a_batch_of_bins_has_padding_that_nobody_learns_from(tmp_path):
    data = packed_data(tmp_path, FEW[:2])
    count = int(data.order.counts.sum())
    batch = data.batch(0, count)
    assert sum(batch.padding) == 16 * count - 110 > 0
    assert batch.targets == int((batch.labels != IGNORED).sum()) == 110 - 7, "each document's tokens but its first"
    for row, (padding, lengths) in enumerate(zip(batch.padding, batch.lengths, strict=True)):
        assert not batch.tokens[row, 16 - padding:].any() and (batch.labels[row, 16 - padding:] == IGNORED).all()
        assert lengths[-1] == padding or not padding
        assert batch.documents[row].tolist() == np.repeat(range(len(lengths)), lengths).tolist()
        assert batch.positions[row].tolist() == [place for length in lengths for place in range(length)]


def test_the_plan_is_part_of_what_the_order_is_and_is_counted(tmp_path):
    table = write_numbered(tmp_path, [[16, 10, 6, 33], [0, 20]])
    packing = planned(tmp_path, table)[0]
    assert packing.figures() == {"sequences": 7, "padding_share": 1 - 85 / (7 * 16), "documents": 5,
                                 "documents_cut": 2, "cut_share": 0.4}
    assert str(packing) == ("best-fit packing: 7 sequences of 16 tokens, 24.107% of them padding; 2 of 5 documents "
                            "(40.00%) are longer and cut")
    plans = [training_data(tmp_path, table, packing=made).order.plan_sha256 for made in (packing, None)]
    packing.sha256[0, 0] ^= 1
    plans.append(training_data(tmp_path, table, packing=packing).order.plan_sha256)
    assert len(set(plans)) == 3
    with pytest.raises(ValueError, match="the packing is of other shards"):
        training_data(tmp_path, ShardTable.of([table.record(row) for row in range(len(table))]), packing=packing)


def test_who_only_reads_a_plan_makes_it_elsewhere(tmp_path):
    table, told = write_numbered(tmp_path, FEW), []
    kept = planned(tmp_path, table)[0]
    planning = Planning.whole(kept.folder, OpenShards(tmp_path, table), 16)
    again = read(planning, pytest.fail)
    assert np.array_equal(again.numbers, kept.numbers) and np.array_equal(again.sha256, kept.sha256)
    os.truncate(kept.folder / INDEX, 40)
    files = contents(tmp_path)
    own = read(planning, told.append)
    assert "is torn" in told[0] and "made for this time alone" in told[0] and contents(tmp_path) == files
    assert_same_batches(*(training_data(tmp_path, table, packing=packing).batch(0, 4) for packing in (own, kept)))
    place = own.folder
    del own
    gc.collect()
    assert not place.exists()


def change(index, name, value):
    write_json(index, read_json(index) | {name: value})


DAMAGE = {
    "a plan cut": (lambda index, plan: os.truncate(plan, plan.stat().st_size - 1), 1, "files were missing or damaged"),
    "a plan gone": (lambda index, plan: plan.unlink(), 1, "their files were missing or damaged"),
    "torn": (lambda index, plan: os.truncate(index, 100), 3, "index.json is torn (JSONDecodeError)"),
    "changed": (lambda index, plan: change(index, "plans", {}), 3, "index.json was changed"),
    "of other shards": (lambda index, plan: change(index, "shards_sha256", "0" * 64), 3, "is of other shards"),
    "gone": (lambda index, plan: index.unlink(), 3, "they were not planned before")}


@pytest.mark.parametrize(("harm", "count", "why"), DAMAGE.values(), ids=DAMAGE)
def test_what_is_damaged_of_a_plan_is_planned_again(tmp_path, harm, count, why):
    table = write_numbered(tmp_path, FEW)
    first, before = planned(tmp_path, table)[0], contents(tmp_path)
    harm(tmp_path / "packing/16" / INDEX, first.path(1))
    assert contents(tmp_path) != before
    if harm is DAMAGE["a plan cut"][0]:
        with pytest.raises(UserError, match="is torn: it has"):
            training_data(tmp_path, table, packing=first).batch(0, 8)
    again, [line] = planned(tmp_path, table)
    assert line.startswith(f"planned the best-fit packing of {count} of 3 token shards: ") and line.endswith(why)
    assert np.array_equal(again.sha256, first.sha256) and contents(tmp_path) == before
    assert planned(tmp_path, table)[1] == []


def test_a_shard_that_gives_another_plan_is_refused(tmp_path):
    table = write_numbered(tmp_path, FEW)
    first, record = planned(tmp_path, table)[0], table.record(0)
    first.path(0).unlink()
    with open(tmp_path / record["path"], "r+b") as file:
        file.seek(record["offsets_offset"] + 8)
        file.write((29).to_bytes(8, "little"))
    with pytest.raises(UserError, match=r"gives another plan of its packing than .*index.json has"):
        planned(tmp_path, table)


def test_ranks_plan_together_what_one_plans_alone(tmp_path):
    """Each of three does its part, none writes another's, and all end up with the same, faults too."""
    table = write_numbered(tmp_path, [*FEW, [20, 20], [9]])
    alone = planned(tmp_path, table)[0]

    def together(group):
        return planned(tmp_path, table, 16, group, "together")
    made = by_three_ranks(together)
    for packing, _ in made:
        assert np.array_equal(packing.sha256, alone.sha256) and np.array_equal(packing.numbers, alone.numbers)
    assert contents(tmp_path / "together") == contents(tmp_path / "packing")
    assert [len(said) for _, said in [*made, *by_three_ranks(together)]] == [1, 0, 0, 0, 0, 0]
    (tmp_path / table.path(3)).unlink()
    made[0][0].path(3).unlink()

    def refused(group):
        with pytest.raises(UserError, match="cannot be read"):
            together(group)
        return True
    assert all(by_three_ranks(refused))


@pytest.mark.parametrize("packed", [False, True])
def test_an_id_outside_the_vocabulary_is_found_in_its_document(tmp_path, packed):
    table = write_numbered(tmp_path, [[30, 4], [7, 40]])
    data = training_data(tmp_path, table, packing=planned(tmp_path, table)[0] if packed else None)
    data.vocabulary, every = 48, int(data.order.counts.sum())
    data.batch(0, every)
    data.vocabulary, key = 47, f"{1:016x}{1:016x}"
    with pytest.raises(UserError, match=rf"code-00001.arrow holds the id 47 at its token 46 \(document 1, key {key}\), "
                                        "but the vocabulary has 47 ids"):
        data.batch(0, every)


def test_the_audit_counts_packed_sequences_however_many_there_are(tmp_path):
    """Documents of 9 tokens leave 7 of 16 empty: more sequences than their tokens would fill."""
    order = packed_data(tmp_path, [[9] * 40, [9] * 40]).order
    assert order.counts.tolist() == [80] and order.pools[0].tokens // 16 == 45
    proven, twice = Audit(), Audit()
    _sequences(order, [(0, 200)], proven)
    _sequences(order, [(0, 200), (81, 83)], twice)
    assert proven.faults == [] and len(twice.faults) == 2
    assert all(fault.startswith("sequence ") and " came 2 times in epoch 1" in fault for fault in twice.faults)
