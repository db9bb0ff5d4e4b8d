"""Files of columns: what one value costs that cannot be read, and what is no fault of the data."""

import errno
import os
import re
from unittest.mock import Mock

import pyarrow as pa
import pytest

from drover.pipeline.core.errors import UserError
from drover.pipeline.data import columnar
from drover.pipeline.data.reading import unit_documents
from tests.data.source_files import batch, lost, payload_of, separated, texts, write_batches

TEXT = ("text", ["text 0", "text 1", "text 2"])


@pytest.fixture(params=["parquet", "arrow"])
def path(request, tmp_path):
    return tmp_path / f"f.{request.param}"


def write(path, *columns):
    """Two row groups, or record batches, of the same columns."""
    write_batches(path, batch(*columns), batch(*columns))


def read(path, *borders, **fields):
    """(documents, rejections) of a file, or of its pieces between these borders."""
    return separated(unit_documents(payload_of(path, *borders, megabytes=0.001, **fields)))


def strings(kind, values):
    """A column of strings of that kind, of bytes that need not be UTF-8."""
    of = kind.replace("string", "binary")
    return pa.array(values, pa.type_for_alias(of)).view(pa.type_for_alias(kind))


@pytest.mark.parametrize("kind", ["string", "large_string", "string_view", "binary"])
def test_a_text_that_is_broken_absent_or_too_long_costs_itself_alone(path, kind):
    values = [b"good", b"bad \xff", None, b"x" * 1001, "\u20ac".encode() * 333 + b"x", "ü".encode()]
    write(path, ("text", strings(kind, values)))
    documents, rejections = read(path)
    assert [(own.id, own.text) for own in documents] == [
        (f"{path.name}:{group + row}", text) for group in (0, 6)
        for row, text in ((1, "good"), (5, "\u20ac" * 333 + "x"), (6, "ü"))]
    assert lost(rejections) == [(row, False) for row in (2, 3, 4, 8, 9, 10)]
    for own, reason in zip(rejections, ("utf-?8", "the field 'text' is null, not text",
                                        r"longer than shard.max_document_mb \(0.001 MB\) allows") * 2, strict=True):
        assert re.search(reason, own.reason, re.IGNORECASE)


TIMES = pa.array([0, 2**62, None], pa.int64())


@pytest.mark.parametrize("column", [
    strings("string", [b"a", b"b\xff", b"c"]), TIMES.view(pa.timestamp("us")),
    pa.array([0, 3_000_000, None], pa.int32()).view(pa.date32())], ids=["text", "time", "date"])
def test_a_value_that_cannot_be_read_costs_its_own_record(tmp_path, column):
    write(tmp_path / "f.arrow", TEXT, ("m", column))
    documents, rejections = read(tmp_path / "f.arrow", meta_fields=["m"])
    assert texts(documents) == ["text 0", "text 2"] * 2 and lost(rejections) == [(2, False), (5, False)]
    assert all("the row cannot be read: " in own.reason for own in rejections)


def test_a_column_of_categories_can_be_the_text(path):
    write(path, ("text", pa.array(["a", "b", None, "a"]).dictionary_encode()))
    documents, rejections = read(path)
    assert texts(documents) == ["a", "b", "a"] * 2 and lost(rejections) == [(3, False), (7, False)]


def test_a_column_that_is_there_twice_is_refused_by_name_where_it_is_wanted(path):
    write(path, *((name, TEXT[1]) for name in ("text", "m", "m")))
    documents, [rejection] = read(path, meta_fields=["m"])
    assert documents == [] and lost([rejection]) == [(None, True)]
    assert "more than one column named m" in rejection.reason
    assert len(read(path)[0]) == 6


@pytest.mark.parametrize(("place", "start", "stream"), [("check_columns", 0, False), ("check_columns", 1, False),
                                                        ("_rows", 0, False), ("_rows", 0, True)])
@pytest.mark.parametrize(("error", "message"), [
    (pa.ArrowMemoryError("malloc of size 1048576 failed"), "needs more memory .*malloc of size 1048576 failed"),
    (OSError(errno.EIO, os.strerror(errno.EIO)), "cannot be read: Input/output error"),
    (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), None), (OSError("1400 requested and 1008 written"), None)])
def test_a_shortage_of_memory_or_disk_is_no_damage(path, monkeypatch, place, start, stream, error, message):
    write_batches(path, batch(TEXT), stream=stream)
    monkeypatch.setattr(columnar, place, Mock(side_effect=error))
    with pytest.raises(UserError if message else OSError, match=message and f"{path.name} {message}") as caught:
        read(path, start, path.stat().st_size)
    assert message or caught.value is error
