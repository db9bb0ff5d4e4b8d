"""Token shards read from an object store: equal to the files, verified, fetched once, and faults named."""

import shutil
from types import SimpleNamespace

import numpy as np
import pytest

from drover.pipeline.core.errors import UserError
from drover.pipeline.data.sampling.loader import TrainingData
from drover.pipeline.data.shard_table import ShardTable, open_shards
from drover.pipeline.data.stored import read_ahead
from drover.pipeline.data.stored import shards as stored_shards
from drover.pipeline.data.stored.copying import copy_shards, survey
from drover.pipeline.data.stored.read_ahead import ReadAhead
from drover.pipeline.data.stored.shards import Settings, StoredTokens
from tests.data.stored.made import make_shards
from tests.refusal import refused
from tests.token_shards import plan_of, shards_in
from tests.waiting import wait_for


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr("drover.pipeline.data.stored.node_cache.PAUSE_S", 0.01)
    monkeypatch.setattr("drover.pipeline.data.stored.shards.PAUSE_S", 0.01)


@pytest.fixture
def made(tmp_path):
    """Shards in a folder and as they were copied; `tokens(...)` is a reader of the copy, with room for so many shards,
    `data(reader)` what is trained on."""
    folder = tmp_path / "encode"
    records, url = make_shards(folder), f"file://{tmp_path}/there"
    table = ShardTable.of(records)

    def tokens(to=url, shards=100, whole=True, say=print):
        copy_shards(folder, records, to)
        limit = int(shards * max(record["bytes"] for record in records))
        return StoredTokens(Settings(to, tmp_path / "cache", limit, whole), table, [""] * len(records), say)

    def data(opener):
        return TrainingData(open_shards(table, "train", ["text"], opener), plan_of(sequence_length=64), 7,
                            table.content("train"), 65536)
    return SimpleNamespace(folder=folder, records=records, table=table, url=url, tokens=tokens, data=data,
                           files=shards_in(folder, records, "train", "text"))


def everything(shard):
    """All that a shard can tell."""
    return (shard.tokens(0, shard.token_count).tolist(), shard.document_starts(30, 700).tolist(),
            shard.document_span(3), shard.document_bytes(4), shard.document_key(5), shard.document_at(333),
            shard.read_offsets().tolist())


@pytest.mark.parametrize(("whole", "room", "counts"), [
    (True, 100, (6, False, False)), (True, 2, (12, True, False)), (True, 0.5, (0, False, True)),
    (False, 100, (0, False, True))])
def test_a_stored_shard_says_what_the_file_says_whatever_the_cache_holds(made, whole, room, counts):
    said = []
    tokens = made.tokens(shards=room, whole=whole, say=said.append)
    figures, wanted = tokens.figures, [everything(file) for file in made.files]
    shutil.rmtree(made.folder)  # it need not be there
    for memory in (1 << 26, 0):  # where documents begin is kept, or looked up
        for row, own in enumerate(wanted):
            assert everything(tokens(row, made.records[row], memory)) == own
            tokens.let_go()
    assert (figures.fetched, figures.removed > 0, figures.ranges > 0) == counts
    assert ["has no room" in text for text in said] == [True] * (room == 0.5)  # once


def test_a_part_that_does_not_come_whole_for_a_while_is_asked_for_again(made, moto_server):
    """test_node_cache.py does the same with whole shards, tests/storage/test_failing_stores.py with other faults."""
    tokens = made.tokens(moto_server.url, whole=False)
    fault = moto_server.fail("truncate", times=2, method="GET", path="00003.arrow")
    assert everything(tokens(3, made.records[3], 0)) == everything(made.files[3])
    assert fault.met == 2


@pytest.mark.parametrize("whole", [True, False])
def test_a_shard_that_changes_or_goes_under_a_run_is_named(made, whole):
    tokens, record = made.tokens(whole=whole), made.records[2]
    tokens.etags = survey(made.url, made.table)
    data = bytearray((made.folder / record["path"]).read_bytes())
    data[record["data_offset"] + 10] ^= 1  # another token, of the same size
    tokens.store.put(record["path"], bytes(data))
    tokens.store.delete([made.records[4]["path"]])
    assert tokens(1, made.records[1], 0).tokens(0, 10) is not None
    for row, told in ((2, "(is not what|was changed)"), (4, "is not (there|in)")):
        refused(UserError, rf"text-0000{row}\.arrow {told}", tokens(row, made.records[row], 0).tokens, 0, 10)


def ahead_of(tokens, data, steps, samples=8, numbers=None):
    """Reading ahead of `steps` steps of so many samples."""
    return ReadAhead(tokens, data, numbers or (lambda step: np.arange(samples * step, samples * (step + 1))),
                     range(steps), 64)


@pytest.mark.parametrize(("whole", "steps"), [(True, 20), (False, 3)])
def test_what_comes_is_read_before_it_is_needed(made, whole, steps):
    tokens = made.tokens(whole=whole)
    data, figures = made.data(tokens), tokens.figures
    ahead = ahead_of(tokens, data, steps)
    ahead._worker.wait()
    before = figures.values()
    for step in range(steps):
        ahead.reached(step)
        data.batch_of(np.arange(8 * step, 8 * step + 8))
    ahead.close()
    assert figures.values() == {**before, "hits": figures.hits, "wait_s": figures.wait_s}, "nothing was fetched"
    assert (before["fetched"], before["ranges"] > 0) == ((6, False) if whole else (0, True))
    assert not whole or (figures.hits > 0 and figures.wait_s == 0.0)


def test_reading_ahead_does_not_run_off(made, monkeypatch):
    monkeypatch.setattr(read_ahead, "SAMPLES", 8)
    tokens, gone = made.tokens(shards=2), []

    def numbers(step):
        gone.append(step)
        return np.arange(step, step + 1)
    ahead = ahead_of(tokens, made.data(tokens), 90, numbers=numbers)
    wait_for(lambda: max(gone, default=0) >= 8)
    ahead.reached(3)
    wait_for(lambda: max(gone) >= 11)
    ahead.close()
    assert max(gone) <= 12  # it asks for the next step before it waits; and it ended


def test_an_error_while_reading_ahead_is_met_by_who_needs_it(made):
    tokens = made.tokens()
    data = made.data(tokens)
    tokens.store.delete([record["path"] for record in made.records])
    ahead = ahead_of(tokens, data, 3)
    ahead._worker.wait()
    refused(UserError, r"\.arrow is not there", data.batch_of, np.arange(8))
    ahead.close()


def test_any_other_error_ends_reading_ahead_and_is_told(made):
    told = []
    tokens = made.tokens()
    tokens.say = told.append

    def numbers(step):
        raise ValueError("no such step")
    ahead = ahead_of(tokens, made.data(tokens), 3, numbers=numbers)
    ahead._worker.wait()
    ahead.reached(1)
    ahead.close()
    assert told == ["token shards are not read ahead any more, only when they are needed: ValueError: no such step"]


def test_a_removed_file_is_let_go_of(made):
    tokens = made.tokens(shards=1)
    first, wanted = tokens(0, made.records[0], 0), made.files[0].tokens(0, 10).tolist()
    for held in (True, False):
        assert first.tokens(0, 10).tolist() == wanted  # the second time it holds the file that is gone
        tokens.let_go()
        assert ("_cached" in first.__dict__) == held
        tokens(1, made.records[1], 0).tokens(0, 10)
    assert first.tokens(0, 10).tolist() == wanted and tokens.figures.fetched == 3


def test_memory_for_parts_is_bounded(made, monkeypatch):
    monkeypatch.setattr(stored_shards, "MEMORY_BYTES", 1000)
    tokens = made.tokens(whole=False)
    shard = tokens(0, made.records[0], 0)
    for start in range(0, 900, 50):
        shard.tokens(start, start + 50)
        assert tokens._memory._bytes <= 1000
    asked = tokens.figures.ranges
    for start, more in ((850, 0), (0, 1)):
        shard.tokens(start, start + 50)
        assert tokens.figures.ranges == asked + more
