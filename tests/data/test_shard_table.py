"""Many shards: what is kept of them is bounded, whatever is read; and the samples are those of shards kept whole."""

import gc
import os
import resource
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest

from drover.pipeline.core.errors import UserError
from drover.pipeline.data import token_shards
from drover.pipeline.data.provenance import documents_of
from drover.pipeline.data.token_shards import NUMBERS, OpenShards, ShardTable, most_open, size_problems
from tests.refusal import refused
from tests.token_shards import SOURCES, assert_same_batches, training_data, write_shards

MIXTURE = {"web": 3.0, "code": 1.0}


@pytest.fixture
def opened(monkeypatch):
    """How often each shard was opened."""
    counted, plain = Counter(), os.open

    def counting(path, *arguments):
        counted[str(path)] += str(path).endswith(".arrow")
        return plain(path, *arguments)
    monkeypatch.setattr(os, "open", counting)
    return counted


def make_shards(folder, count):
    """Records of real shards of both sources, in an order that is not that of their paths."""
    draw = np.random.default_rng(0)
    return write_shards(folder, [
        (f"{'train' if number % 5 else 'validation'}/{SOURCES[number % 2]}-{count - number:05d}",
         [draw.integers(0, 500, length) for length in draw.integers(0, 40, 7)]) for number in range(count)])


def data_of(folder, table, most=1000, kept_bytes=1 << 26, mixture=MIXTURE):
    with patch.object(token_shards, "most_open", lambda: most):
        opened = OpenShards(table, folder)
    opened._kept_offsets = kept_bytes
    return training_data(folder, table, mixture=mixture, opened=opened)


def open_files():
    return len(list(Path("/proc/self/fd").iterdir()))


def test_a_table_says_of_each_shard_what_its_record_does(tmp_path):
    """Which shards a split and a source have, sampling/test_phases.py and stages/test_encode.py tell."""
    records = make_shards(tmp_path, 11)
    table, kept = ShardTable.of(records), ("path", "sha256", "split", "source", "dtype", *NUMBERS)
    assert [table.record(row) for row in range(len(table))] == [{key: record[key] for key in kept}
                                                                for record in records]
    empty = ShardTable.of([])
    assert len(empty) == len(empty.rows("train")) == 0 and list(empty.content("train")) == []


@pytest.mark.parametrize(("mixture", "kept_bytes"), [(MIXTURE, 0), (None, 1 << 20)])
def test_samples_are_those_of_shards_kept_whole_over_several_epochs(tmp_path, monkeypatch, mixture, kept_bytes):
    """Also where threads read through a single place: a shard that is forgotten while another thread reads it must not
    give that thread another file's bytes."""
    monkeypatch.setattr(token_shards, "BLOCK", 3)
    table = ShardTable.of(make_shards(tmp_path, 14))
    few, all_ = (data_of(tmp_path, table, *kept, mixture) for kept in ((1, kept_bytes), (1000, 1 << 26)))
    assert min(few.order.epochs(600).values()) > 2
    numbers = [np.random.default_rng(seed).integers(0, 600, 40) for seed in range(20)]
    with ThreadPoolExecutor(8) as pool:
        for samples, batch in zip(numbers, pool.map(few.batch_of, numbers), strict=True):
            assert_same_batches(batch, all_.batch_of(samples))
    assert documents_of(few, [(0, 60)]) == documents_of(all_, [(0, 60)])


def test_files_and_entries_are_bounded_whatever_is_read(tmp_path, opened):
    """A few files under many names: thousands of shards as the loader sees it."""
    many = []
    for number, record in enumerate(make_shards(tmp_path, 8) * 64):
        many.append({**record, "split": "train", "path": f"train/{record['source']}-9{number:04d}.arrow"})
        (tmp_path / many[-1]["path"]).symlink_to(tmp_path / record["path"])
    data = data_of(tmp_path, ShardTable.of(many), most=20, kept_bytes=0)
    gc.collect()  # what other tests have left open
    kept, before = data.shards[0].opened, open_files()
    for first in range(0, 1500, 50):
        data.batch_of(np.arange(first, first + 50))
        assert open_files() <= before + 21
    assert len(opened) > 200 and kept.shard.cache_info().currsize == 20
    assert kept.shard(int(data.shards[0].rows[0]))._kept is None  # no offsets are held
    del data, kept
    gc.collect()
    assert open_files() == before


def test_nothing_is_opened_before_it_is_read(tmp_path, opened):
    """Nor looked at, but by one rank: tests/stages/test_start_up.py."""
    table = ShardTable.of(make_shards(tmp_path, 12))
    opened.clear()
    data = data_of(tmp_path, table)
    assert not opened
    data.batch_of(np.arange(1))
    data.batch_of(np.arange(1))
    assert 1 <= len(opened) <= 3 and set(opened.values()) == {1}, "it stays open"


def test_a_shard_that_is_cut_is_told_at_the_first_read_and_by_its_size(tmp_path):
    records = make_shards(tmp_path, 10)
    table, path = ShardTable.of(records), tmp_path / records[1]["path"]
    for harm, problem in ((lambda: os.truncate(path, 100), f"it has 100 bytes instead of {records[1]['bytes']}"),
                          (path.unlink, "cannot be read: No such file")):
        harm()
        assert size_problems(tmp_path, table, range(10)) == [refused(
            UserError, rf"{path.name}.* {problem}.* --stage encode again", data_of(tmp_path, table).batch_of,
            np.arange(200))]


def test_few_open_files_are_enough(monkeypatch):
    for soft, wanted in ((1 << 20, 1024), (1024, 256), (3, 1), (resource.RLIM_INFINITY, 1024)):
        monkeypatch.setattr(resource, "getrlimit", lambda _, soft=soft: (soft, soft))
        assert most_open() == wanted
