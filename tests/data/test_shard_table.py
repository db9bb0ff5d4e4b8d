"""Many shards: what is kept of them is bounded, whatever is read; and the samples are those of shards kept whole."""

from __future__ import annotations

import gc
import os
import pickle
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.data import token_shards
from pipeline.data.provenance import documents_of
from pipeline.data.sampling.loader import TrainingData
from pipeline.data.sampling.order import Pool, SampleOrder
from pipeline.data.sampling.streams import TokenStream
from pipeline.data.shard_table import NUMBERS, OpenShards, Shards, ShardTable, most_open, open_shards, size_problems
from pipeline.data.token_shards import TokenShard
from pipeline.errors import UserError
from pipeline.files import output_record, sha256_json
from tests.token_shards import write_documents

SOURCES = ("web", "code")
MIXTURE = {"web": 3.0, "code": 1.0}
_opened: Counter[str] = Counter()
_counting = False


def _count(event, arguments):
    if _counting and event == "open" and str(arguments[0]).endswith(".arrow"):
        _opened[str(arguments[0])] += 1


sys.addaudithook(_count)


@contextmanager
def opens():
    """Counts how often each shard is opened within."""
    global _counting
    _opened.clear()
    _counting = True
    try:
        yield _opened
    finally:
        _counting = False


def make_shards(folder, count, documents=7, seed=0):
    """Records of real shards of both sources, in an order that is not that of their paths."""
    draw, records = np.random.default_rng(seed), []
    for number in range(count):
        source = SOURCES[number % 2]
        lengths = draw.integers(0, 40, documents)
        path = folder / f"train/{source}-{count - number:05d}.arrow"
        content = write_documents(path, [draw.integers(0, 500, length) for length in lengths], lengths.tolist(),
                              [f"{number:016x}{row:016x}" for row in range(documents)], dtype="uint16", metadata={})
        records.append(output_record(folder, path, split="train" if number % 5 else "heldout", source=source,
                                     **content, input="x", input_sha256="y"))
    return records


def data_of(folder, table, most=None, whole=None, mixture=MIXTURE):
    opened = OpenShards(folder, table, most)
    if whole is not None:
        opened._whole = whole
    return TrainingData({source: Shards(opened, table.rows("train", source)) for source in SOURCES}, 16, 3, mixture,
                        table.content("train"), 500)


def kept_whole(folder, records, mixture=MIXTURE):
    """The same data over shards that are all there as objects, with all their offsets in memory."""
    shards = {source: [TokenShard(folder / record["path"], record)
                       for record in sorted(records, key=lambda record: record["path"])
                       if (record["split"], record["source"]) == ("train", source)] for source in SOURCES}
    return TrainingData(shards, 16, 3, mixture, [[record["path"], record["sha256"]] for record in records
                                                 if record["split"] == "train"])


def test_a_table_says_of_each_shard_what_its_record_does(tmp_path):
    records = make_shards(tmp_path, 11)
    table = pickle.loads(pickle.dumps(ShardTable.of(records)))
    assert len(table) == 11
    for row, record in enumerate(records):
        wanted = ("path", "sha256", "split", "source", "dtype", *NUMBERS)
        assert table.record(row) == {key: record[key] for key in wanted}
    for split in ("train", "heldout"):
        for source in (*SOURCES, None):
            wanted = sorted(record["path"] for record in records
                            if record["split"] == split and source in (None, record["source"]))
            assert [shard.record["path"] for shard in open_shards(tmp_path, table, split, source)] == wanted
    empty = ShardTable.of([])
    assert [len(found) for found in (empty, empty.rows("train"))] == [0, 0]
    assert list(empty.content("train")) == []


@pytest.mark.parametrize("mixture", [MIXTURE, None])
@pytest.mark.parametrize("whole", [0, 1 << 20])
def test_samples_are_those_of_shards_kept_whole_over_several_epochs(tmp_path, monkeypatch, mixture, whole):
    monkeypatch.setattr(token_shards, "BLOCK", 3)
    records = make_shards(tmp_path, 14)
    few, all_ = data_of(tmp_path, ShardTable.of(records), 2, whole, mixture), kept_whole(tmp_path, records, mixture)
    assert few.order.plan_sha256 == all_.order.plan_sha256
    epochs = few.order.epochs(600)
    assert min(epochs.values()) > 2
    for first in range(0, 600, 60):
        one, other = few.batch(first, 60), all_.batch(first, 60)
        assert one.lengths == other.lengths and one.targets == other.targets
        for name in ("tokens", "labels", "documents", "positions"):
            assert np.array_equal(getattr(one, name), getattr(other, name))
    assert documents_of(few, [(0, 60)]) == documents_of(all_, [(0, 60)])


def test_files_and_entries_are_bounded_whatever_is_read(tmp_path):
    """A few files under many names: thousands of shards as the loader sees it."""
    records = make_shards(tmp_path, 8)
    many = [{**record, "split": "train", "path": f"train/{record['source']}-9{number:04d}.arrow"}
            for number in range(500) for record in records[number % 8:number % 8 + 1]]
    for number, record in enumerate(many):
        (tmp_path / record["path"]).symlink_to(tmp_path / records[number % 8]["path"])
    data = data_of(tmp_path, ShardTable.of(many), most=20, whole=0)
    gc.collect()  # what other tests have left open
    opened, before = data.streams[0].shards.opened, len(list(Path("/proc/self/fd").iterdir()))
    most = 0
    with opens() as counted:
        for first in range(0, 1500, 50):
            data.batch(first, 50)
            most = max(most, len(list(Path("/proc/self/fd").iterdir())) - before)
        assert len(counted) > 200
    assert len(opened) == 20 and most <= 21
    assert all(shard._kept is None for shard in opened._kept.values())  # no offsets are held
    del data, opened
    gc.collect()
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_nothing_is_looked_at_before_it_is_read(tmp_path, monkeypatch):
    records, looked = make_shards(tmp_path, 12), []
    table = ShardTable.of(records)
    stat = os.stat
    with opens() as counted, monkeypatch.context() as patched:
        patched.setattr(os, "stat", lambda path, **rest: looked.append(str(path)) or stat(path, **rest))
        data = data_of(tmp_path, table)
        assert not [path for path in looked if path.endswith(".arrow")] and not counted
        data.batch(0, 1)
        assert 1 <= len(counted) <= 3 and set(counted.values()) == {1}
        data.batch(0, 1)
        assert set(counted.values()) == {1}  # it stays open
        looked.clear()
        assert size_problems(tmp_path, table, range(1, 12, 3)) == []
        assert sorted(looked) == sorted(str(tmp_path / records[row]["path"]) for row in range(1, 12, 3))


def test_a_shard_that_is_cut_is_told_at_the_first_read_and_by_its_size(tmp_path):
    records = make_shards(tmp_path, 10)
    table, path = ShardTable.of(records), tmp_path / records[1]["path"]
    os.truncate(path, 100)
    told = rf"{path.name} is torn: it has 100 bytes instead of {records[1]['bytes']}\. Run --stage encode again"
    with pytest.raises(UserError, match=told):
        data_of(tmp_path, table).batch(0, 200)
    assert [path.name in problem for problem in size_problems(tmp_path, table, range(10))] == [True]
    path.unlink()
    with pytest.raises(UserError, match=rf"{path.name} cannot be read: No such file .* --stage encode again"):
        data_of(tmp_path, table).batch(0, 200)
    [problem] = size_problems(tmp_path, table, range(10))
    assert f"{path.name} cannot be read: No such file" in problem


def test_an_id_outside_of_the_vocabulary_is_told_with_its_shard_and_document(tmp_path):
    records = make_shards(tmp_path, 10)
    at, number, record = next(
        (start + 2, number, record) for record in records if record["split"] == "train"
        for number in range(record["docs"]) for start, stop in [TokenShard(tmp_path / record["path"], record)
                                                               .document_span(number)] if stop > start + 4)
    with open(tmp_path / record["path"], "r+b") as file:
        file.seek(record["data_offset"] + 2 * at)
        file.write((500).to_bytes(2, "little"))
    key = TokenShard(tmp_path / record["path"], record).document_key(number)
    data = data_of(tmp_path, ShardTable.of(records))
    with pytest.raises(UserError, match=rf"{Path(record['path']).name} holds the id 500 at its token {at} "
                                        rf"\(document {number}, key {key}\), but the vocabulary has 500 ids"):
        data.batch(0, int(data.order.counts.sum()) * 4)


def test_threads_read_through_few_places(tmp_path):
    """A shard that is forgotten while another thread reads it must not give that thread another file's bytes."""
    records = make_shards(tmp_path, 16)
    few, all_ = data_of(tmp_path, ShardTable.of(records), most=1, whole=0), kept_whole(tmp_path, records)
    numbers = [np.random.default_rng(seed).integers(0, 500, 40) for seed in range(40)]
    with ThreadPoolExecutor(8) as pool:
        for asked, found in zip(numbers, pool.map(few.batch_of, numbers), strict=True):
            assert np.array_equal(found.tokens, all_.batch_of(asked).tokens)


@settings(max_examples=60, deadline=None)
@given(lengths=st.lists(st.integers(0, 30) | st.just(4000), max_size=60), data=st.data())
def test_documents_are_found_in_the_file_as_in_memory(tmp_path_factory, lengths, data):
    folder = tmp_path_factory.mktemp("shard")
    path = folder / "train/web-00000.arrow"
    content = write_documents(path, [np.zeros(length, "uint16") for length in lengths], lengths,
                          [f"{row:032x}" for row in range(len(lengths))], dtype="uint16", metadata={})
    record = output_record(folder, path, split="train", source="web", **content)
    held, looked_up = TokenShard(path, record), TokenShard(path, record, whole=0)
    start = data.draw(st.integers(0, held.token_count))
    stop = data.draw(st.integers(start, held.token_count))
    block, token_shards.BLOCK = token_shards.BLOCK, data.draw(st.sampled_from([1, 2, 5, 512]))
    try:
        assert looked_up._kept is None and held._kept is not None
        assert np.array_equal(looked_up.document_starts(start, stop), held.document_starts(start, stop))
        if start < held.token_count:
            number = looked_up.document_at(start)
            begin, end = looked_up.document_span(number)
            assert number == held.document_at(start) and begin <= start < end
            assert (begin, end) == held.document_span(number) == tuple(held.read_offsets()[number:number + 2])
    finally:
        token_shards.BLOCK = block


def test_changed_offsets_are_noticed_where_they_are_read(tmp_path):
    path = tmp_path / "train/web-00000.arrow"
    content = write_documents(path, [np.zeros(10, "uint16")] * 4000, [1] * 4000, ["00" * 16] * 4000, dtype="uint16",
                          metadata={})
    record = output_record(tmp_path, path, split="train", source="web", **content)
    for place, wanted in ((4000, 39_999), (0, 1), (2000, 5), (2000, 39_000), (2000, -1)):
        with open(path, "r+b") as file:
            file.seek(record["offsets_offset"] + 8 * place)
            file.write(wanted.to_bytes(8, "little", signed=True))
        with pytest.raises(UserError, match=r"does not hold the 4000 documents .* its content was changed"):
            TokenShard(path, record, whole=0).document_starts(19_990, 20_010)
        with open(path, "r+b") as file:
            file.seek(record["offsets_offset"] + 8 * place)
            file.write((10 * place).to_bytes(8, "little"))
    assert TokenShard(path, record, whole=0).document_starts(19_990, 20_010).tolist() == [19_990, 20_000]


def test_a_plan_hashes_the_same_whether_its_content_is_a_list_or_streamed():
    content = [[f"train/ä-{number}.arrow", f"{number:064x}"] for number in range(5)]
    for rows in (content, content[:1], []):
        orders = [SampleOrder([Pool("all", 1000)], 8, 0, None, what) for what in (rows, iter(rows))]
        assert orders[0].plan_sha256 == orders[1].plan_sha256
    content = content * 500
    for value in ({"c": content}, {"a": 1, "c": content}, {"c": content, "d": [2]}, {"b": 0, "c": content, "z": "x"}):
        assert sha256_json(value) == sha256_json({**value, "c": iter(content)}, streamed="c")


def test_few_open_files_are_enough(monkeypatch):
    import resource
    for soft, wanted in ((1 << 20, 1024), (1024, 256), (3, 1), (resource.RLIM_INFINITY, 1024)):
        monkeypatch.setattr(resource, "getrlimit", lambda _, soft=soft: (soft, soft))
        assert most_open() == wanted


def test_a_stream_of_a_hundred_thousand_shards_is_columns(tmp_path):
    """Without files: what is made at the start is arrays, and no object a shard."""
    count = 100_000
    numbers = np.tile(np.array([[500, 10, 125_000_000, 64, 0, 0, 0]], np.int64), (count, 1))
    names = [f"train/web-{number:06d}.arrow".encode() for number in range(count)]
    table = ShardTable(numbers, np.zeros((count, 32), np.uint8), b"".join(names),
                       np.cumsum([len(name) for name in names]), np.zeros(count, np.int32),
                       (("train", "web", "uint32"),))
    shards = open_shards(tmp_path, table, "train")
    stream = TokenStream(shards)
    assert stream.tokens == count * 125_000_000 and len(shards.opened) == 0
    assert shards[count - 1].path.name == "web-099999.arrow" and len(shards.opened) == 1
