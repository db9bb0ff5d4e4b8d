"""Token shards read from an object store: equal to the files, verified, fetched once, and faults named."""

from __future__ import annotations

import multiprocessing
import pickle
import shutil

import numpy as np
import pytest

from pipeline.data.sampling.loader import TrainingData
from pipeline.data.shard_table import ShardTable, open_by_source, open_shards
from pipeline.data.stored import shards as stored_shards
from pipeline.data.stored.copying import survey
from pipeline.data.stored.read_ahead import ReadAhead
from pipeline.errors import UserError
from tests.data.stored.made import copy, make_shards, stored
from tests.waiting import wait_for


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr("pipeline.data.stored.node_cache.PAUSE_S", 0.01)
    monkeypatch.setattr("pipeline.data.stored.shards.PAUSE_S", 0.01)


@pytest.fixture
def made(tmp_path):
    return tmp_path / "encode", make_shards(tmp_path / "encode")


def training(folder, records, opener=None):
    """Training data of the shards."""
    table = ShardTable.of(records)
    return TrainingData(open_by_source(folder, table, "train", ["text"], opener), 64, 7, None, table.content("train"),
                        65536)


def everything(shard):
    """All that a shard can tell."""
    return (shard.tokens(0, shard.token_count).tolist(), shard.document_starts(30, 700).tolist(),
            shard.document_span(3), shard.document_bytes(4), shard.document_key(5), shard.document_at(333),
            shard.read_offsets().tolist())


@pytest.mark.parametrize("whole", [True, False])
def test_a_stored_shard_tells_what_the_file_tells(made, moto_server, tmp_path, whole):
    folder, records = made
    tokens = stored(copy(folder, records, moto_server.url), records, tmp_path / "c", whole=whole)
    files = open_shards(folder, records, "train", "text")
    for memory in (1 << 26, 0):  # where documents begin is kept, or looked up
        for row, file in enumerate(files):
            assert everything(tokens(row, records[row], memory)) == everything(file)
    figures = tokens.figures
    assert (figures.fetched, figures.ranges > 0) == ((6, False) if whole else (0, True))


@pytest.mark.parametrize(("whole", "room"), [(True, 100), (True, 2), (True, 0.5), (False, 100)])
def test_batches_are_equal_whatever_the_cache_holds(made, seaweed, tmp_path, whole, room):
    folder, records = made
    said = []
    tokens = stored(copy(folder, records, seaweed.url_of("t")), records, tmp_path / "c", shards=room, whole=whole,
                    say=said.append)
    files, store = training(folder, records), training(folder, records, tokens)
    assert store.order.plan_sha256 == files.order.plan_sha256
    for first in range(0, 160, 8):
        mine, theirs = store.batch(first, 8), files.batch(first, 8)
        assert all((getattr(mine, name) == getattr(theirs, name)).all()
                   for name in ("tokens", "labels", "documents", "positions"))
        tokens.let_go()
        if whole:
            files_there = list(tokens.cache.folder.glob("*.arrow"))
            assert sum(path.stat().st_size for path in files_there) <= tokens.cache.limit
    if room == 0.5:  # not one fits: read in parts, which is counted and said
        assert tokens.figures.fetched == 0 and tokens.figures.ranges > 0 and "has no room" in said[0]
    if room == 2:
        assert tokens.figures.removed > 0 and tokens.figures.ranges == 0 and not said


def read_all(pickled, barrier, results):
    """In another process: all tokens of all shards."""
    tokens, records = pickle.loads(pickled)
    barrier.wait()
    results.put(sum(int(tokens(row, record, 0).tokens(0, record["tokens"]).sum())
                    for row, record in enumerate(records)))


def test_two_processes_of_a_node_fetch_a_shard_once(made, moto_server, tmp_path):
    folder, records = made
    tokens = stored(copy(folder, records, moto_server.url), records, tmp_path / "c", say=print)
    moto_server.seen.clear()
    context = multiprocessing.get_context("spawn")
    barrier, results = context.Barrier(2), context.Queue()
    processes = [context.Process(target=read_all, args=(pickle.dumps((tokens, records)), barrier, results))
                 for _ in range(2)]
    for process in processes:
        process.start()
    sums = [results.get() for _ in processes]
    for process in processes:
        process.join()
    files = open_shards(folder, records, "train", "text")
    assert sums == [sum(int(file.tokens(0, file.token_count).sum()) for file in files)] * 2
    asked = [path for method, path, _ in moto_server.seen if method == "GET" and path.endswith(".arrow")]
    assert len(asked) == len(set(asked)) == 6


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("kind", ["error", "slow down", "cut", "truncate"])
@pytest.mark.parametrize("of", ["moto_server", "google", "azurite"])
def test_a_store_that_fails_for_a_while_gives_a_right_result(made, of, request, tmp_path, whole, kind):
    folder, records = made
    bucket = request.getfixturevalue(of)
    tokens = stored(copy(folder, records, bucket.url), records, tmp_path / "c", whole=whole)
    fault = bucket.fail(kind, times=2, method="GET", path="00003.arrow")
    file = open_shards(folder, records, "train", "text")[3]
    assert everything(tokens(3, records[3], 0)) == everything(file)
    assert fault.met == 2


@pytest.mark.parametrize("whole", [True, False])
def test_a_shard_that_changes_under_a_run_is_named(made, moto_server, tmp_path, whole):
    folder, records = made
    url = copy(folder, records, moto_server.url)
    table = ShardTable.of(records)
    tokens = stored(url, records, tmp_path / "c", whole=whole)
    tokens.etags = survey(url, table, _digest(records))
    data = bytearray((folder / records[2]["path"]).read_bytes())
    data[records[2]["data_offset"] + 10] ^= 1  # another token, of the same size
    tokens.store.put(records[2]["path"], bytes(data))
    assert tokens(1, records[1], 0).tokens(0, 10) is not None
    with pytest.raises(UserError, match=r"text-00002\.arrow (is not what|was changed)"):
        tokens(2, records[2], 0).tokens(0, 10)


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("of", ["seaweed", "google", "azurite"])
def test_a_shard_that_goes_and_a_wrong_secret_are_named(made, of, request, tmp_path, monkeypatch, whole):
    folder, records = made
    bucket = request.getfixturevalue(of)
    name, wrong = bucket.key
    tokens = stored(copy(folder, records, bucket.url_of("t")), records, tmp_path / "c", whole=whole)
    tokens.store.delete([records[4]["path"]])
    with pytest.raises(UserError, match=r"text-00004\.arrow is not"):
        tokens(4, records[4], 0).tokens(0, 10)
    monkeypatch.setenv(name, wrong)
    with pytest.raises(UserError, match=rf"text-00003\.arrow: .*refused.*{name}") as refused:
        tokens(3, records[3], 0).tokens(0, 10)
    assert wrong not in str(refused.value)


def test_what_comes_is_fetched_before_it_is_needed(made, moto_server, tmp_path):
    folder, records = made
    tokens = stored(copy(folder, records, moto_server.url), records, tmp_path / "c")
    data = training(folder, records, tokens)
    ahead = ReadAhead(tokens, data, lambda step: np.arange(8 * step, 8 * step + 8), range(20), 64)
    wait_for(lambda: tokens.figures.fetched == 6)
    for step in range(20):
        ahead.reached(step)
        data.batch(8 * step, 8)
    assert tokens.figures.fetched == 6 and tokens.figures.hits > 0 and tokens.figures.wait_s == 0.0
    ahead.close()


def test_parts_are_read_before_they_are_needed(made, moto_server, tmp_path):
    folder, records = made
    tokens = stored(copy(folder, records, moto_server.url), records, tmp_path / "c", whole=False)
    data = training(folder, records, tokens)
    ahead = ReadAhead(tokens, data, lambda step: np.arange(8 * step, 8 * step + 8), range(3), 64)
    ahead._thread.join()
    asked = tokens.figures.ranges
    assert asked > 0
    for step in range(3):
        data.batch(8 * step, 8)
    assert tokens.figures.ranges == asked
    ahead.close()


def test_reading_ahead_does_not_run_off(made, moto_server, tmp_path, monkeypatch):
    monkeypatch.setattr("pipeline.data.stored.read_ahead.SAMPLES", 8)
    folder, records = made
    tokens = stored(copy(folder, records, moto_server.url), records, tmp_path / "c", shards=2)
    data, gone = training(folder, records, tokens), []

    def numbers(step):
        gone.append(step)
        return np.arange(step, step + 1)
    ahead = ReadAhead(tokens, data, numbers, range(90), 64)
    wait_for(lambda: max(gone) >= 8)
    ahead.reached(3)
    wait_for(lambda: max(gone) >= 11)
    ahead.close()
    assert max(gone) <= 12  # it asks for the next step before it waits; and it ended


def test_an_error_while_reading_ahead_is_met_by_who_needs_it(made, moto_server, tmp_path):
    folder, records = made
    tokens = stored(copy(folder, records, moto_server.url), records, tmp_path / "c")
    data = training(folder, records, tokens)
    tokens.store.delete([record["path"] for record in records])
    ahead = ReadAhead(tokens, data, lambda step: np.arange(8), range(3), 64)
    ahead._thread.join()
    with pytest.raises(UserError, match=r"\.arrow is not there"):
        data.batch(0, 8)
    ahead.close()


def test_rows_are_those_that_samples_are_read_from(made, tmp_path):
    folder, records = made
    data, samples = training(folder, records), np.arange(93)
    told = data.shard_rows(samples).tolist()
    read = set()
    shards = data.streams[0].shards
    original = type(shards).__getitem__

    def noted(self, index):
        read.add(int(self.rows[index]))
        return original(self, index)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(shards), "__getitem__", noted)
        data.batch_of(samples)
    assert set(told) == read and len(told) == len(set(told)) == 6


def test_a_removed_file_is_let_go_of(made, moto_server, tmp_path):
    folder, records = made
    tokens = stored(copy(folder, records, moto_server.url), records, tmp_path / "c", shards=1)
    first = tokens(0, records[0], 0)
    before = first.tokens(0, 10).tolist()
    tokens(1, records[1], 0).tokens(0, 10)
    assert first.tokens(0, 10).tolist() == before  # it holds the file that is gone
    tokens.let_go()
    assert "_cached" not in first.__dict__ and first.tokens(0, 10).tolist() == before
    assert tokens.figures.fetched == 3


def test_memory_for_parts_is_bounded(made, moto_server, tmp_path, monkeypatch):
    monkeypatch.setattr(stored_shards, "MEMORY_BYTES", 1000)
    folder, records = made
    tokens = stored(copy(folder, records, moto_server.url), records, tmp_path / "c", whole=False)
    shard = tokens(0, records[0], 0)
    for start in range(0, 900, 50):
        shard.tokens(start, start + 50)
        assert len(tokens._memory) <= 1000
    asked = tokens.figures.ranges
    shard.tokens(850, 900)
    assert tokens.figures.ranges == asked
    shard.tokens(0, 50)
    assert tokens.figures.ranges == asked + 1


def _digest(records):
    from pipeline.data.stored.copying import digest
    return digest(records)


def test_the_folder_of_shards_need_not_be_there(made, moto_server, tmp_path):
    folder, records = made
    tokens = stored(copy(folder, records, moto_server.url), records, tmp_path / "c")
    shutil.rmtree(folder)
    assert training(folder, records, tokens).batch(0, 8).tokens.shape == (8, 64)
