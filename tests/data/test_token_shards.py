"""Token shards: Arrow reads what training reads; torn and changed files are named."""

import os
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.data.shard_table import open_shards
from pipeline.data.token_shards import TokenShard, read_batch
from pipeline.errors import UserError
from pipeline.files import output_record
from tests.token_shards import write_documents

REPOSITORY = Path(__file__).resolve().parents[2]
DOCUMENTS = [[1, 5, 6, 7, 2], [1, 2], [9], [], [1, 65535, 2], list(range(1000))]
KEYS = [f"{number:032x}" for number in range(len(DOCUMENTS))]


def make(folder, documents=DOCUMENTS, dtype="uint16", name="train/web-00000.arrow"):
    path = folder / name
    content = write_documents(path, [np.array(ids, dtype) for ids in documents], [10 * len(ids) for ids in documents],
                          [f"{number:032x}" for number in range(len(documents))], dtype=dtype,
                          metadata={"tokenizer_sha256": "ab"})
    split, _, rest = name.partition("/")
    return TokenShard(path, output_record(folder, path, split=split, source=rest.split("-")[0], **content))


def rows(path):
    """The documents as pyarrow reads them."""
    with pa.OSFile(str(path)) as file:
        return pa.ipc.open_file(file).read_all()


@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
def test_training_and_arrow_read_the_same(tmp_path, dtype):
    shard = make(tmp_path, dtype=dtype)
    table = rows(shard.path)
    assert table.column("tokens").to_pylist() == DOCUMENTS
    assert table.schema.field("tokens").type == pa.large_list(pa.from_numpy_dtype(dtype))
    assert table.schema.metadata == {b"format": b"1", b"dtype": dtype.encode(), b"tokenizer_sha256": b"ab"}
    assert (shard.documents, shard.token_count) == (len(DOCUMENTS), sum(map(len, DOCUMENTS)))
    for number, ids in enumerate(DOCUMENTS):
        read = shard.document_tokens(number)
        assert read.tolist() == ids and read.dtype == dtype
        assert shard.document_bytes(number) == table.column("bytes")[number].as_py() == 10 * len(ids)
        assert shard.document_key(number) == table.column("key")[number].as_py().hex() == KEYS[number]


@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
def test_recorded_offsets_find_the_columns_without_arrow(tmp_path, dtype):
    shard = make(tmp_path, dtype=dtype)
    tokens = np.memmap(shard.path, dtype, "r", shard.record["data_offset"], (shard.token_count,))
    assert tokens.tolist() == [token for ids in DOCUMENTS for token in ids]
    offsets = np.memmap(shard.path, "<i8", "r", shard.record["offsets_offset"], (shard.documents + 1,))
    assert offsets.tolist() == [0, 5, 7, 8, 8, 11, 1011] == shard.read_offsets().tolist()


def test_the_file_is_one_uncompressed_batch(tmp_path):
    shard = make(tmp_path, [[7] * 100_000])
    reader = pa.ipc.open_file(pa.memory_map(str(shard.path)))
    assert reader.num_record_batches == 1
    assert 200_000 < shard.path.stat().st_size < 203_000 and shard.record["data_offset"] % 8 == 0


def test_equal_documents_give_equal_bytes(tmp_path):
    first, again = make(tmp_path / "a"), make(tmp_path / "b")
    assert first.path.read_bytes() == again.path.read_bytes()


@settings(max_examples=40, deadline=None)
@given(documents=st.lists(st.lists(st.integers(0, 65535), max_size=9), max_size=9), data=st.data())
def test_any_window_and_its_document_starts(tmp_path_factory, documents, data):
    shard = make(tmp_path_factory.mktemp("shard"), documents)
    flat = [token for ids in documents for token in ids]
    start = data.draw(st.integers(0, len(flat)))
    stop = data.draw(st.integers(start, len(flat)))
    assert shard.tokens(start, stop).tolist() == flat[start:stop]
    begins = {sum(map(len, documents[:number])) for number in range(len(documents))}
    assert shard.document_starts(start, stop).tolist() == sorted(at for at in begins if start <= at < stop)


def test_tokens_are_a_copy(tmp_path):
    shard = make(tmp_path)
    shard.tokens(0, 5)[:] = 0
    assert shard.tokens(0, 5).tolist() == DOCUMENTS[0]


def test_what_is_outside_is_an_error(tmp_path):
    shard = make(tmp_path)
    for start, stop in ((0, shard.token_count + 1), (-1, 2), (5, 4)):
        with pytest.raises(IndexError):
            shard.tokens(start, stop)
    for read in (shard.document_tokens, shard.document_bytes, shard.document_key):
        with pytest.raises(IndexError):
            read(len(DOCUMENTS))
        with pytest.raises(IndexError):
            read(-1)


def test_a_shard_can_be_empty(tmp_path):
    shard = make(tmp_path, [])
    assert shard.tokens(0, 0).tolist() == shard.document_starts(0, 0).tolist() == []
    assert read_batch(shard.path).num_rows == 0


def test_a_shard_goes_to_another_process(tmp_path):
    shard = make(tmp_path)
    shard.tokens(0, 1)
    assert pickle.loads(pickle.dumps(shard)).tokens(0, 5).tolist() == DOCUMENTS[0]


def test_datasets_reads_it(tmp_path):
    from datasets import load_dataset
    shard = make(tmp_path, dtype="uint32")
    data = load_dataset("arrow", data_files=[str(shard.path)], split="train", cache_dir=str(tmp_path / "cache"))
    assert data["tokens"][:] == DOCUMENTS and data[5]["key"].hex() == KEYS[5]


def test_shards_are_found_by_split_and_source(tmp_path):
    made = [make(tmp_path, name=name) for name in ("train/web-00001.arrow", "train/web-00000.arrow",
                                                   "heldout/web-00000.arrow", "train/code-00000.arrow")]
    outputs = [shard.record for shard in made]

    def names(*which):
        return [shard.path.relative_to(tmp_path).as_posix() for shard in open_shards(tmp_path, outputs, *which)]
    assert names("train") == ["train/code-00000.arrow", "train/web-00000.arrow", "train/web-00001.arrow"]
    assert names("heldout", "web") == ["heldout/web-00000.arrow"] and names("heldout", "code") == []


def test_a_torn_file_is_named(tmp_path):
    shard = make(tmp_path)
    os.truncate(shard.path, shard.path.stat().st_size - 100)
    with pytest.raises(UserError, match=r"web-00000.arrow is torn: .* bytes instead of .* --stage encode"):
        TokenShard(shard.path, shard.record).tokens(0, 1)
    with pytest.raises(UserError, match=r"web-00000.arrow is torn or not a token shard"):
        read_batch(shard.path)
    shard.path.unlink()
    with pytest.raises(UserError, match="cannot be read: No such file"):
        TokenShard(shard.path, shard.record).tokens(0, 1)


def test_a_file_cut_while_it_is_read_is_an_error_and_no_signal(tmp_path):
    shard = make(tmp_path)
    shard.tokens(0, 10)
    os.truncate(shard.path, shard.record["data_offset"] + 20)
    with pytest.raises(UserError, match="cut after training began"):
        shard.tokens(0, shard.token_count)


def test_changed_document_boundaries_are_noticed(tmp_path):
    shard = make(tmp_path)
    with open(shard.path, "r+b") as file:
        file.seek(shard.record["offsets_offset"] + 8)
        file.write(b"\xff" * 8)
    with pytest.raises(UserError, match="its content was changed"):
        shard.document_starts(0, 10)
    with pytest.raises(UserError, match="torn or not a token shard"):
        read_batch(shard.path)


def test_a_file_of_something_else_is_no_shard(tmp_path):
    path = tmp_path / "x.arrow"
    batch = pa.record_batch({"text": ["a"]})
    with pa.ipc.new_file(str(path), batch.schema) as writer:
        writer.write_batch(batch)
    with pytest.raises(UserError, match="not a token shard"):
        read_batch(path)


def test_reading_needs_no_arrow(tmp_path):
    shard = make(tmp_path)
    (tmp_path / "shard.pickle").write_bytes(pickle.dumps(shard))
    code = ("import pickle, sys; shard = pickle.load(open(sys.argv[1], 'rb'));"
            "print(shard.tokens(0, 5).tolist(), shard.document_key(1)[-2:], 'pyarrow' in sys.modules)")
    result = subprocess.run([sys.executable, "-c", code, str(tmp_path / "shard.pickle")], cwd=REPOSITORY, text=True,
                            capture_output=True, check=True)
    assert result.stdout.strip() == "[1, 5, 6, 7, 2] 01 False"
