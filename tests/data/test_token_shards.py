"""Token shards: Arrow reads what training reads; torn and changed files are named; of many shards what is kept is
bounded, and the samples are those of shards kept whole."""

import gc
import os
import pickle
import re
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from drover.pipeline.core.errors import UserError
from drover.pipeline.data import token_shards
from drover.pipeline.data.provenance import documents_of
from drover.pipeline.data.token_shards import OpenShards, ShardTable, TokenShard, read_batch, size_problems
from tests.conftest import run_python
from tests.refusal import refused
from tests.token_shards import SOURCES, assert_same_batches, training_data, write_shards

DOCUMENTS = [[1, 5, 6, 7, 2], [1, 2], [9], [], [1, 65535, 2], list(range(1000))]
KEYS = [f"{number:032x}" for number in range(len(DOCUMENTS))]


def make(folder, documents=DOCUMENTS, dtype="uint16"):
    [record] = write_shards(folder, [("train/web-00000", documents)], dtype)
    return TokenShard(folder / record["path"], record)


@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
def test_training_and_arrow_read_the_same(tmp_path, dtype):
    shard = make(tmp_path, dtype=dtype)
    batch = read_batch(shard.path)
    assert batch.to_pylist() == [{"tokens": ids, "bytes": 10 * len(ids), "key": bytes.fromhex(key)}
                                 for ids, key in zip(DOCUMENTS, KEYS, strict=True)]
    assert batch.schema.field("tokens").type == pa.large_list(pa.from_numpy_dtype(dtype))
    assert batch.schema.metadata == {b"format": b"1", b"dtype": dtype.encode(), b"tokenizer_sha256": b"ab"}
    assert (shard.documents, shard.token_count, shard.record["text_bytes"]) == (len(DOCUMENTS), 1011, 10 * 1011)
    for number, ids in enumerate(DOCUMENTS):
        read = shard.document_tokens(number)
        assert read.tolist() == ids and read.dtype == dtype
        assert (shard.document_bytes(number), shard.document_key(number)) == (10 * len(ids), KEYS[number])
    assert shard.record["data_offset"] % 8 == 0 and shard.read_offsets().tolist() == [0, 5, 7, 8, 8, 11, 1011]
    shard.tokens(0, 5)[:] = 0
    assert shard.tokens(0, 5).tolist() == DOCUMENTS[0], "what is given is a copy"


@given(lengths=st.lists(st.integers(0, 30) | st.just(4000), max_size=60), data=st.data(),
       block=st.sampled_from([1, 2, 5, 512]), kept=st.sampled_from([0, token_shards.KEPT]))
def test_documents_are_found_wherever_they_begin(tmp_path_factory, monkeypatch, lengths, data, block, kept):
    documents = np.split(np.arange(sum(lengths)) % 65_536, np.cumsum(lengths)[:-1]) if lengths else []
    shard = make(tmp_path_factory.mktemp("shard"), documents)
    start = data.draw(st.integers(0, shard.token_count))
    stop = data.draw(st.integers(start, shard.token_count))
    spans = list(pairwise([0, *np.cumsum(lengths, dtype=int).tolist()]))
    monkeypatch.setattr(token_shards, "BLOCK", block)
    monkeypatch.setattr(token_shards, "KEPT", kept)
    assert shard.tokens(start, stop).tolist() == (np.arange(start, stop) % 65_536).tolist()
    assert shard.document_starts(start, stop).tolist() == sorted({begin for begin, _ in spans if start <= begin < stop})
    if start < shard.token_count:
        [number] = [number for number, (begin, end) in enumerate(spans) if begin <= start < end]
        assert shard.document_at(start) == number and shard.document_span(number) == spans[number]
    assert read_batch(shard.path).num_rows == len(lengths)


def test_a_torn_file_is_named(tmp_path):
    shard = make(tmp_path)
    shard.tokens(0, 10)
    os.truncate(shard.path, shard.record["data_offset"] + 20)
    refused(UserError, "cut after training began", shard.tokens, 0, shard.token_count)  # an error, and no signal
    refused(UserError, r"web-00000.arrow is damaged or not a token shard", read_batch, shard.path)
    batch = pa.record_batch({"text": ["a"]})
    with pa.ipc.new_file(str(shard.path), batch.schema) as writer:
        writer.write_batch(batch)
    refused(UserError, "not a token shard", read_batch, shard.path)


def test_changed_document_boundaries_are_noticed_where_they_are_read(tmp_path):
    shard = make(tmp_path, [np.zeros(10)] * 4000)

    def put(place, value):
        with open(shard.path, "r+b") as file:
            file.seek(shard.record["offsets_offset"] + 8 * place)
            file.write(value.to_bytes(8, "little", signed=True))
    for place, wrong in ((4000, 39_999), (0, 1), (2000, 5), (2000, 39_000), (2000, -1)):
        put(place, wrong)
        refused(UserError, r"does not hold the 4000 documents .* its content was changed",
                TokenShard(shard.path, shard.record).document_starts, 19_990, 20_010)
        put(place, 10 * place)
    assert shard.document_starts(19_990, 20_010).tolist() == [19_990, 20_000]
    put(2000, -1)
    refused(UserError, "damaged or not a token shard", read_batch, shard.path)


def test_reading_needs_no_arrow(tmp_path):
    (tmp_path / "shard.pickle").write_bytes(pickle.dumps(make(tmp_path)))
    code = ("import pickle, sys; shard = pickle.load(open(sys.argv[1], 'rb'));"
            "print(shard.tokens(0, 5).tolist(), shard.document_key(1)[-2:], 'pyarrow' in sys.modules)")
    result = run_python("-c", code, tmp_path / "shard.pickle")
    assert result.stdout == "[1, 5, 6, 7, 2] 01 False\n"


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


def data_of(folder, table, most=1000, mixture=MIXTURE):
    with patch.object(token_shards, "most_open", lambda: most):
        opened = OpenShards(table, folder)
    return training_data(folder, table, mixture=mixture, opened=opened)


def open_files():
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.mark.parametrize("mixture", [MIXTURE, None])
def test_samples_are_those_of_shards_kept_open_over_several_epochs(tmp_path, monkeypatch, mixture):
    """Also where threads read through a single place: a shard that is forgotten while another thread reads it must not
    give that thread another file's bytes."""
    monkeypatch.setattr(token_shards, "BLOCK", 3)
    table = ShardTable.of(make_shards(tmp_path, 14))
    few, all_ = (data_of(tmp_path, table, most, mixture) for most in (1, 1000))
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
    data = data_of(tmp_path, ShardTable.of(many), most=20)
    gc.collect()  # what other tests have left open
    kept, before = data.shards[0].opened, open_files()
    for first in range(0, 1500, 50):
        data.batch_of(np.arange(first, first + 50))
        assert open_files() <= before + 21
    assert len(opened) > 200 and kept.shard.cache_info().currsize == 20
    del data, kept
    gc.collect()
    assert open_files() == before


def test_a_shard_that_is_cut_is_told_at_the_first_read_and_by_its_size(tmp_path):
    records = make_shards(tmp_path, 10)
    table, path = ShardTable.of(records), tmp_path / records[1]["path"]
    for harm, problem in ((lambda: os.truncate(path, 100), f"has 100 bytes instead of {records[1]['bytes']:,}"),
                          (path.unlink, "(is missing|cannot be read: No such file)")):
        harm()
        message = rf"{path.name} {problem}.* --stage encode again"
        refused(UserError, message, data_of(tmp_path, table).batch_of, np.arange(200))
        [said] = size_problems(tmp_path, table, range(10))
        assert re.search(message, said)
