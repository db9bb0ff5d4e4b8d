"""Files of columns: what one value costs that cannot be read, and what is no fault of the data."""

import errno
import json
import os

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from pipeline.config.data import FilesSource
from pipeline.data import columnar
from pipeline.data.documents import Rejection
from pipeline.data.reading import unit_documents
from pipeline.errors import UserError

ENDINGS = ["parquet", "arrow"]


@pytest.fixture(params=ENDINGS)
def path(request, tmp_path):
    return tmp_path / f"f.{request.param}"


def write(path, names, columns, rows=3):
    """A file of two row groups, or record batches, each with `rows` rows."""
    batch = pa.RecordBatch.from_arrays([pa.array([f"text {row}" for row in range(rows)]) if column is None else column
                                        for column in columns], names=names)
    if path.suffix == ".parquet":
        with pq.ParquetWriter(path, batch.schema) as writer:
            for _ in range(2):
                writer.write_batch(batch)
    else:
        with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, batch.schema) as writer:
            for _ in range(2):
                writer.write_batch(batch)


def read(path, *, start=0, cache=None, **fields):
    """(documents, rejections) of a file from its byte `start` on."""
    about, source = path.stat(), FilesSource(kind="files", name="s", paths=[str(path)], **fields)
    piece = {"name": f"s/{path.name}", "path": str(path), "bytes": about.st_size, "mtime_ns": about.st_mtime_ns,
             "start": start, "stop": about.st_size}
    items = list(unit_documents({"source": source.model_dump(mode="json"), "pieces": [piece],
                                 "max_document_mb": 1.0}, cache=cache))
    return ([item[0] for item in items if not isinstance(item, Rejection)],
            [item for item in items if isinstance(item, Rejection)])


def broken(kind):
    """Three strings, of which the second is not UTF-8."""
    data = [b"a", b"b\xff", b"c"]
    if kind == "string_view":
        return pa.array(data, pa.binary_view()).view(pa.string_view())
    strings = pa.array(data, pa.large_binary()).view(pa.large_string()) if kind == "large_string" else \
        pa.array(data, pa.binary()).view(pa.string())
    if kind == "dictionary":
        return pa.DictionaryArray.from_arrays(pa.array([0, 1, 2], pa.int32()), strings)
    return pa.ListArray.from_arrays([0, 1, 2, 3], strings) if kind == "list" else strings


@pytest.mark.parametrize("kind", ["string", "large_string", "string_view", "dictionary", "list"])
def test_a_broken_byte_of_meta_costs_its_own_record(path, kind):
    write(path, ["text", "m"], [None, broken(kind)])
    documents, rejections = read(path, meta_fields=["m"])
    as_list = kind == "list"
    assert [(document.text, document.meta["m"]) for document in documents] == 2 * [
        ("text 0", ["a"] if as_list else "a"), ("text 2", ["c"] if as_list else "c")]
    assert [(own.record, own.documents, own.lost) for own in rejections] == [(2, 1, False), (5, 1, False)]
    assert all("the field 'm'" in own.reason and "utf-8" in own.reason.lower() for own in rejections)


def test_a_broken_byte_of_an_id_costs_its_own_record(path):
    write(path, ["text", "name"], [None, broken("string")])
    documents, rejections = read(path, id_field="name")
    assert [document.id for document in documents] == ["a", "c"] * 2
    assert [own.record for own in rejections] == [2, 5]
    assert all("the field 'name': broken UTF-8" in own.reason for own in rejections)


def test_a_broken_field_of_json_lines_is_named(tmp_path):
    (tmp_path / "f.jsonl").write_bytes(b'{"text": "x", "m": {"k": "\xff"}, "name": "1"}\n'
                                       b'{"text": "x", "m": 1, "name": "\xff"}\n{"text": "\xff", "m": 1, "name": "1"}')
    _, rejections = read(tmp_path / "f.jsonl", id_field="name", meta_fields=["m"])
    assert [own.reason.partition("broken")[0] for own in rejections] == [
        "in the field 'm': ", "in the field 'name': ", ""]


BEYOND = {"date32": pa.array([0, 3_000_000, None], pa.int32()).view(pa.date32()),
          "date64": pa.array([0, 3_000_000 * 86_400_000, None], pa.int64()).view(pa.date64()),
          "timestamp": pa.array([0, 2**62, None], pa.int64()).view(pa.timestamp("us")),
          "with_zone": pa.array([0, 2**62, None], pa.int64()).view(pa.timestamp("s", "UTC")),
          "duration": pa.array([0, 2**62, None], pa.int64()).view(pa.duration("s"))}
BEYOND["dictionary"] = pa.DictionaryArray.from_arrays(pa.array([0, 1, 2], pa.int32()), BEYOND["date32"])
BEYOND["list"] = pa.ListArray.from_arrays([0, 1, 2, 3], BEYOND["date32"])


@pytest.mark.parametrize("kind", BEYOND)
def test_a_time_beyond_the_calendar_is_a_number_in_meta(tmp_path, kind):
    column = BEYOND[kind]
    write(tmp_path / "f.arrow", ["text", "m"], [None, column])
    documents, rejections = read(tmp_path / "f.arrow", meta_fields=["m"])
    numbers = {"date32": "3000000", "date64": str(3_000_000 * 86_400_000), "dictionary": "3000000", "list": None}
    assert [document.meta["m"] for document in documents[:3]] == [
        ["1970-01-01"] if kind == "list" else str(column[0].as_py()), numbers.get(kind, str(2**62)),
        [None] if kind == "list" else None]
    assert len(documents) == 6 and rejections == []


def test_a_time_beyond_the_calendar_is_no_id(path):
    write(path, ["text", "when"], [None, BEYOND["timestamp"]])
    documents, rejections = read(path, id_field="when")
    assert documents == [] and [own.record for own in rejections] == [1, 2, 3, 4, 5, 6]
    assert "the field 'when' cannot be read: date value out of range" in rejections[1].reason


def test_a_time_zone_that_nobody_knows_is_no_crash(tmp_path):
    write(tmp_path / "f.arrow", ["text", "m"], [None, pa.array([5, 6, 7]).view(pa.timestamp("s", "Nowhere/Here"))])
    documents, _ = read(tmp_path / "f.arrow", meta_fields=["m"])
    assert [document.meta["m"] for document in documents] == ["5", "6", "7"] * 2


@pytest.mark.parametrize("names", [["text", "text"], ["text", "m", "m"]])
def test_a_column_that_is_there_twice_is_refused_by_name(path, names):
    write(path, names, [None] * len(names))
    documents, [rejection] = read(path, meta_fields=names[2:])
    assert documents == [] and rejection.lost and rejection.record is None
    assert f"more than one column named {names[-1]}" in rejection.reason


def test_a_column_that_is_there_twice_and_not_wanted_does_no_harm(path):
    write(path, ["text", "m", "m"], [None] * 3)
    documents, rejections = read(path)
    assert len(documents) == 6 and rejections == []


def no_memory():
    return pa.ArrowMemoryError("malloc of size 1048576 failed")


@pytest.mark.parametrize("place", ["open", "read"])
@pytest.mark.parametrize("start", [0, 1])
def test_a_shortage_of_memory_is_no_damage(path, monkeypatch, place, start):
    def fail(*arguments, **settings):
        raise no_memory()
    write(path, ["text"], [None])
    monkeypatch.setattr(columnar, "check_columns" if place == "open" else "_batch_records", fail)
    with pytest.raises(UserError, match=f"{path.name} needs more memory .*malloc of size 1048576 failed"):
        read(path, start=start)


def test_memory_that_is_gone_while_a_stream_of_batches_is_read_is_no_damage(tmp_path, monkeypatch):
    def fail(*arguments, **settings):
        raise no_memory()
    batch = pa.record_batch({"text": ["a"]})
    with pa.OSFile(str(tmp_path / "f.arrow"), "wb") as sink, pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    monkeypatch.setattr(columnar, "_texts", fail)
    with pytest.raises(UserError, match="needs more memory"):
        read(tmp_path / "f.arrow")


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)),
                                   OSError("1400 requested and 1008 written")])
def test_a_full_disk_is_no_damage(path, monkeypatch, error):
    def fail(*arguments, **settings):
        raise error
    write(path, ["text"], [None])
    monkeypatch.setattr(columnar, "_batch_records", fail)
    with pytest.raises(OSError) as caught:
        read(path)
    assert caught.value is error


def test_a_disk_that_fails_as_a_later_part_is_opened_is_heard(path, monkeypatch):
    def fail(*arguments, **settings):
        raise OSError(errno.EIO, os.strerror(errno.EIO))
    write(path, ["text"], [None])
    monkeypatch.setattr(columnar, "check_columns", fail)
    with pytest.raises(UserError, match="cannot be read: Input/output error"):
        read(path, start=1)


def test_frames_are_read_though_the_disk_has_no_room_to_keep_their_places(tmp_path, monkeypatch):
    def fail(*arguments, **settings):
        raise OSError("1400 requested and 1008 written")
    lines = [json.dumps({"text": f"text {number}"}).encode() + b"\n" for number in range(9)]
    frames = [zstandard.compress(line) for line in lines]
    (tmp_path / "f.jsonl.zst").write_bytes(b"".join(frames))
    monkeypatch.setattr(np, "save", fail)
    documents, rejections = read(tmp_path / "f.jsonl.zst", start=len(frames[0]), cache=tmp_path / "cache")
    assert [document.text for document in documents] == [f"text {number}" for number in range(2, 9)]
    assert rejections == [] and list((tmp_path / "cache").iterdir()) == []
