"""Files of columns: what one value costs that cannot be read, and what is no fault of the data."""

import errno
import os
from unittest.mock import Mock

import numpy as np
import pyarrow as pa
import pytest
import zstandard

from pipeline.data import columnar
from pipeline.data.reading import unit_documents
from pipeline.data.zstd_frames import frame_starts
from pipeline.errors import UserError
from tests.data.source_files import batch, lost, payload_of, texts, told, write_batches

TEXT = ("text", ["text 0", "text 1", "text 2"])


@pytest.fixture(params=["parquet", "arrow"])
def path(request, tmp_path):
    return tmp_path / f"f.{request.param}"


def write(path, *columns):
    """Two row groups, or record batches, of the same columns."""
    write_batches(path, batch(*columns), batch(*columns))


def read(path, *, start=0, **fields):
    """(documents, rejections) of a file from its byte `start` on."""
    return told(unit_documents(payload_of(path, start, path.stat().st_size, megabytes=0.001, **fields)))


def strings(kind, values):
    """A column of strings of that kind, of bytes that need not be UTF-8."""
    if kind == "dictionary":
        places = pa.array([None if value is None else place for place, value in enumerate(values)], pa.int32())
        return pa.DictionaryArray.from_arrays(places, strings("string", [value or b"" for value in values]))
    if kind == "list":
        return pa.ListArray.from_arrays(range(len(values) + 1), strings("string", values))
    of = kind.replace("string", "binary")
    return pa.array(values, pa.type_for_alias(of)).view(pa.type_for_alias(kind))


@pytest.mark.parametrize("kind", ["string", "large_string", "string_view", "dictionary", "binary"])
def test_a_text_that_is_broken_absent_or_too_long_costs_itself_alone(path, kind):
    values = [b"good", b"bad \xff", None, b"x" * 1001, "\u20ac".encode() * 333 + b"x", "ü".encode()]
    write(path, ("text", strings(kind, values)))
    documents, rejections = read(path)
    assert texts(documents) == ["good", "\u20ac" * 333 + "x", "ü"] * 2
    assert [own.id for own in documents] == [f"{path.name}:{row}" for row in (1, 5, 6, 7, 11, 12)]
    assert lost(rejections) == [(row, False) for row in (2, 3, 4, 8, 9, 10)]
    for own, reason in zip(rejections, ("broken UTF-8", "the field 'text' is null, not text",
                                        "longer than shard.max_document_mb (0.001 MB) allows") * 2, strict=True):
        assert own.reason.startswith(reason)


@pytest.mark.parametrize("kind", ["string", "large_string", "string_view", "dictionary", "list"])
def test_a_broken_byte_of_meta_or_an_id_costs_its_own_record(path, kind):
    write(path, TEXT, ("m", strings(kind, [b"a", b"b\xff", b"c"])))
    for fields in ({"meta_fields": ["m"]}, *([] if kind == "list" else [{"id_field": "m"}])):
        documents, rejections = read(path, **fields)
        assert texts(documents) == ["text 0", "text 2"] * 2 and lost(rejections) == [(2, False), (5, False)]
        kept = [own.meta["m"] if "meta_fields" in fields else own.id for own in documents]
        assert kept == (["a", "c"] if kind != "list" else [["a"], ["c"]]) * 2
        assert all("the field 'm'" in own.reason and "utf-8" in own.reason.lower() for own in rejections)


DATES = pa.array([0, 3_000_000, None], pa.int32()).view(pa.date32())


@pytest.mark.parametrize(("column", "kept"), [
    (DATES, ["1970-01-01", "3000000", None]),
    (pa.array([0, 2**62, None], pa.int64()).view(pa.timestamp("us")), ["1970-01-01 00:00:00", str(2**62), None]),
    (pa.array([0, 2**62, None], pa.int64()).view(pa.timestamp("s", "Nowhere/Here")), ["0", str(2**62), None]),
    (pa.DictionaryArray.from_arrays(pa.array([0, 1, 2], pa.int32()), DATES), ["1970-01-01", "3000000", None]),
    (pa.ListArray.from_arrays([0, 1, 2, 3], DATES), [["1970-01-01"], None, [None]])],
    ids=["date", "time", "unknown zone", "dictionary", "list"])
def test_a_time_beyond_the_calendar_is_a_number_in_meta_and_no_id(tmp_path, column, kept):
    write(tmp_path / "f.arrow", TEXT, ("m", column))
    documents, rejections = read(tmp_path / "f.arrow", meta_fields=["m"])
    assert [own.meta["m"] for own in documents] == kept * 2 and rejections == []
    documents, rejections = read(tmp_path / "f.arrow", id_field="m")
    assert documents == [] and [own.record for own in rejections] == [1, 2, 3, 4, 5, 6]
    assert "the field 'm' cannot be read: " in rejections[1].reason


@pytest.mark.parametrize("names", [["text", "text"], ["text", "m", "m"]])
def test_a_column_that_is_there_twice_is_refused_by_name_where_it_is_wanted(path, names):
    write(path, *((name, TEXT[1]) for name in names))
    documents, [rejection] = read(path, meta_fields=names[2:])
    assert documents == [] and lost([rejection]) == [(None, True)]
    assert f"more than one column named {names[-1]}" in rejection.reason
    if names[2:]:
        assert len(read(path)[0]) == 6


NO_MEMORY = pa.ArrowMemoryError("malloc of size 1048576 failed")


@pytest.mark.parametrize(("place", "start", "stream"), [("check_columns", 0, False), ("check_columns", 1, False),
                                                        ("_batch_records", 0, False), ("_texts", 0, True)])
@pytest.mark.parametrize(("error", "told"), [
    (NO_MEMORY, "needs more memory .*malloc of size 1048576 failed"),
    (OSError(errno.EIO, os.strerror(errno.EIO)), "cannot be read: Input/output error"),
    (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), None), (OSError("1400 requested and 1008 written"), None)])
def test_a_shortage_of_memory_or_disk_is_no_damage(path, monkeypatch, place, start, stream, error, told):
    write_batches(path, batch(TEXT), stream=stream)
    monkeypatch.setattr(columnar, place, Mock(side_effect=error))
    with pytest.raises(UserError if told else OSError, match=told and f"{path.name} {told}") as caught:
        read(path, start=start)
    assert told or caught.value is error


def test_frames_are_found_though_the_disk_has_no_room_to_keep_their_places(tmp_path, monkeypatch):
    path, frame = tmp_path / "f.zst", zstandard.compress(b"text")
    path.write_bytes(frame * 2)
    monkeypatch.setattr(np, "save", Mock(side_effect=OSError("1400 requested and 1008 written")))
    assert frame_starts(path, tmp_path / "cache").tolist() == [0, len(frame)]
    assert list((tmp_path / "cache").iterdir()) == []
