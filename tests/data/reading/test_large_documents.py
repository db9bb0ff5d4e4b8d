"""Documents beyond `shard.max_document_mb`: each costs itself, is named, and is never held in memory."""

import gzip
import json
import tracemalloc

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from pipeline.config.data import FilesSource, ShardConfig
from pipeline.config.section import identity
from pipeline.config.tree import Config
from pipeline.data.documents import Rejection
from pipeline.data.reading import unit_documents
from pipeline.data.sources import input_files, reading_units

REASON = "longer than shard.max_document_mb (1 MB) allows"
LARGE = 20_000_000
"""Bytes of a document that is far too long for memory that is bounded."""


def read(path, megabytes=1.0, **fields):
    """(texts by id, rejections, most bytes that Python held at a time)."""
    source = FilesSource(kind="files", name="s", paths=[str(path)], **fields)
    config = Config(shard=ShardConfig(sources=[source], max_document_mb=megabytes))
    tracemalloc.start()
    items = [item for _, payload in reading_units(config.shard, input_files(config))
             for item in unit_documents(payload)]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return ({item[0].id: item[0].text for item in items if not isinstance(item, Rejection)},
            [item for item in items if isinstance(item, Rejection)], peak)


def told(rejections):
    return [(own.record, own.reason, own.documents, own.lost) for own in rejections]


@pytest.mark.parametrize("ending", ["", ".gz", ".zst"])
def test_a_line(tmp_path, ending):
    data = b'{"text": "first"}\n{"text": "' + b"x" * LARGE + b'"}\n{"text": "last"}\n' + b"[" * LARGE
    packed = {"": bytes, ".gz": gzip.compress, ".zst": zstandard.compress}[ending](data)
    (tmp_path / f"f.jsonl{ending}").write_bytes(packed)
    del data, packed
    texts, rejections, peak = read(tmp_path / "f.*")
    assert texts == {f"f.jsonl{ending}:1": "first", f"f.jsonl{ending}:3": "last"}
    assert told(rejections) == [(2, REASON, 1, False), (4, REASON, 1, False)] and peak < LARGE / 2


@pytest.mark.parametrize("separator", [None, "||"])
def test_a_text(tmp_path, separator):
    (tmp_path / "f.txt").write_bytes(b"first||" + b"x" * LARGE + b"||last")
    texts, rejections, peak = read(tmp_path / "f.txt", separator=separator)
    if separator is None:
        assert (texts, told(rejections)) == ({}, [(None, REASON, 1, False)])
    else:
        assert texts == {"f.txt:1": "first", "f.txt:3": "last"}
        assert told(rejections) == [(2, REASON, 1, False)]
    assert peak < LARGE / 2


def test_a_separator_that_never_comes(tmp_path):
    (tmp_path / "f.txt").write_bytes(b"word " * (LARGE // 5))
    texts, rejections, peak = read(tmp_path / "f.txt", separator="<|end|>")
    assert texts == {} and told(rejections) == [(1, REASON, 1, False)] and peak < LARGE / 2


@pytest.mark.parametrize("data", [
    b'[{"text": "first"}, {"text": "' + b"x" * LARGE + b'"}, {"text": "last"}]',
    b'[{"text": "first"}, {"text": [' + b"1," * (LARGE // 2), b'{"text": "first"}\n{"text": "first"' + b" " * LARGE],
    ids=["text", "brackets", "spaces"])
def test_a_value_of_json_costs_what_follows_it(tmp_path, data):
    (tmp_path / "f.json").write_bytes(data)
    texts, rejections, peak = read(tmp_path / "f.json")
    assert texts == {"f.json:1": "first"} and told(rejections) == [(2, REASON, 1, True)] and peak < LARGE / 2


@pytest.mark.parametrize("text", ["x" * LARGE, '"' + "x" * LARGE + '"', '"' + "line\n" * (LARGE // 5) + '"'])
def test_a_field_of_csv_costs_what_follows_it(tmp_path, text):
    (tmp_path / "f.csv").write_text(f"id,text\n1,first\n2,{text}\n3,last\n")
    texts, rejections, peak = read(tmp_path / "f.csv", id_field="id")
    assert texts == {"1": "first"} and told(rejections) == [(2, REASON, 1, True)] and peak < LARGE / 2


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.binary()], ids=str)
@pytest.mark.parametrize("ending", ["parquet", "arrow"])
def test_a_value_of_a_column(tmp_path, kind, ending):
    table = pa.table({"text": pa.array(["first", "x" * 1_000_001, None, "y" * 1_000_000, "last"]).cast(kind)})
    if ending == "parquet":
        pq.write_table(table, tmp_path / "f.parquet")
    else:
        with pa.OSFile(str(tmp_path / "f.arrow"), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
            writer.write_table(table)
    texts, rejections, _ = read(tmp_path / f"f.{ending}")
    assert list(texts) == [f"f.{ending}:{row}" for row in (1, 4, 5)]
    assert [own[:2] for own in told(rejections)] == [(2, REASON), (3, "the field 'text' is null, not text")]


def test_bytes_of_utf_8_count_and_not_characters(tmp_path):
    for name, text in (("a", "\u20ac" * 333_333 + "x"), ("b", "\u20ac" * 333_334)):
        (tmp_path / f"{name}.txt").write_text(text)
        (tmp_path / f"{name}.json").write_text(json.dumps([{"text": text}], ensure_ascii=False))
    texts, rejections, _ = read(tmp_path / "*")
    assert list(texts) == ["a.json:1", "a.txt"]
    assert [(own.file, own.reason) for own in rejections] == [("b.json", REASON), ("b.txt", REASON)]


def test_runs_of_before_the_limit_keep_their_identity():
    assert "max_document_mb" not in identity(ShardConfig())
    assert identity(ShardConfig(max_document_mb=5.0))["max_document_mb"] == 5.0
