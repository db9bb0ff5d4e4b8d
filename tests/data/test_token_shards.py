"""Token shards: Arrow reads what training reads; torn and changed files are named."""

import os
import pickle
from itertools import pairwise

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from drover.pipeline.core.errors import UserError
from drover.pipeline.data import token_shards
from drover.pipeline.data.token_shards import TokenShard, read_batch, write_shard
from tests.conftest import run_python
from tests.refusal import refused
from tests.token_shards import write_shards

DOCUMENTS = [[1, 5, 6, 7, 2], [1, 2], [9], [], [1, 65535, 2], list(range(1000))]
KEYS = [f"{number:032x}" for number in range(len(DOCUMENTS))]


def make(folder, documents=DOCUMENTS, dtype="uint16", **options):
    [record] = write_shards(folder, [("train/web-00000", documents)], dtype)
    return TokenShard(folder / record["path"], record, **options)


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
       block=st.sampled_from([1, 2, 5, 512]))
def test_documents_are_found_in_the_file_as_in_memory(tmp_path_factory, monkeypatch, lengths, data, block):
    documents = np.split(np.arange(sum(lengths)) % 65_536, np.cumsum(lengths)[:-1]) if lengths else []
    held = make(tmp_path_factory.mktemp("shard"), documents)
    looked_up = TokenShard(held.path, held.record, index_limit=0)
    start = data.draw(st.integers(0, held.token_count))
    stop = data.draw(st.integers(start, held.token_count))
    spans = list(pairwise([0, *np.cumsum(lengths, dtype=int).tolist()]))
    monkeypatch.setattr(token_shards, "BLOCK", block)
    assert looked_up._kept is None and held._kept is not None
    for shard in (held, looked_up):
        assert shard.tokens(start, stop).tolist() == (np.arange(start, stop) % 65_536).tolist()
        assert shard.document_starts(start, stop).tolist() == sorted(
            {begin for begin, _ in spans if start <= begin < stop})
        if start < held.token_count:
            [number] = [number for number, (begin, end) in enumerate(spans) if begin <= start < end]
            assert shard.document_at(start) == number and shard.document_span(number) == spans[number]
    assert read_batch(held.path).num_rows == len(lengths)


def test_what_is_outside_is_an_error(tmp_path):
    shard = make(tmp_path)
    for span in ((0, shard.token_count + 1), (-1, 2), (5, 4)):
        refused(IndexError, "which has", shard.tokens, *span)
    for read in (shard.document_tokens, shard.document_bytes, shard.document_key):
        for number in (len(DOCUMENTS), -1):
            refused(IndexError, "which has", read, number)
    refused(ValueError, r"the 1 keys of .* are not of 16 bytes each", write_shard,
            tmp_path / "x", np.zeros(1, "uint16"), np.array([0, 1]), [1], ["00"], metadata={})


def test_a_torn_file_is_named(tmp_path):
    """What training is told of it, test_shard_table.py has."""
    shard = make(tmp_path)
    shard.tokens(0, 10)
    os.truncate(shard.path, shard.record["data_offset"] + 20)
    refused(UserError, "cut after training began", shard.tokens, 0, shard.token_count)  # an error, and no signal
    refused(UserError, r"web-00000.arrow is damaged or not a token shard", read_batch, shard.path)
    batch = pa.record_batch({"text": ["a"]})
    with pa.ipc.new_file(str(shard.path), batch.schema) as writer:
        writer.write_batch(batch)
    refused(UserError, "not a token shard", read_batch, shard.path)


@pytest.mark.parametrize("index_limit", [0, 1 << 20])
def test_changed_document_boundaries_are_noticed_where_they_are_read(tmp_path, index_limit):
    shard = make(tmp_path, [np.zeros(10)] * 4000, index_limit=index_limit)

    def put(place, value):
        with open(shard.path, "r+b") as file:
            file.seek(shard.record["offsets_offset"] + 8 * place)
            file.write(value.to_bytes(8, "little", signed=True))
    for place, wrong in ((4000, 39_999), (0, 1), (2000, 5), (2000, 39_000), (2000, -1)):
        put(place, wrong)
        refused(UserError, r"does not hold the 4000 documents .* its content was changed",
                TokenShard(shard.path, shard.record, index_limit).document_starts, 19_990, 20_010)
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
