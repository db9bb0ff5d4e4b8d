"""Files into records: one generator per format, over plain, .gz and .zst files.

A generator yields `(number, record)` with the 1-based line or record number (None where the file is one document), or
an `Unreadable` in its place; damage that ends the file is raised as one of `damage()`. Text is decoded with
`surrogateescape`, so a broken byte costs its own record, not the rest of the file: whoever encodes the record again
finds it.
"""

from __future__ import annotations

import csv
import io
import json
import tempfile
import tokenize
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.config.data import FilesSource
from pipeline.data.file_kinds import mistaken
from pipeline.data.streams import COMPRESSIONS, map_file, open_stream

CHUNK = 1 << 20
"""Characters read at a time where records have no line ends to go by."""
LARGEST = 1 << 28
"""Characters of one JSON value or CSV field beyond which a missing quote or bracket is the likelier explanation."""
ROWS = 256
"""Rows of a columnar file taken into memory at a time."""


@dataclass(frozen=True)
class Unreadable:
    """In place of a record: what is wrong, how many documents it costs, and whether unknown more are lost."""

    number: int | None
    reason: str
    documents: int = 1
    lost: bool = False


class PlainText(str):
    """A record without fields: all of it is the document's text. (A string in a JSON file is none.)"""


Records = Iterator[tuple[int | None, Any] | Unreadable]


class UnusableColumnsError(Exception):
    """A columnar file has not the columns that the source names."""


def damage() -> tuple[type[Exception], ...]:
    """Exceptions that a damaged file causes in the readers; an OSError counts only without an errno."""
    import pyarrow as pa
    return (OSError, EOFError, UnicodeDecodeError, csv.Error, pa.ArrowException, UnusableColumnsError)


def file_format(path: Path, asked: str = "auto") -> str | None:
    """The format to read `path` as, by its ending unless asked for another; None if the ending says nothing."""
    if asked != "auto":
        return asked
    inner = path.with_suffix("") if path.suffix.lower() in COMPRESSIONS else path
    ending = inner.suffix.lower().lstrip(".")
    return ending if ending in FORMATS else None


def file_records(path: Path, source: FilesSource) -> Records:
    """The records of one file of a `files` source."""
    kind = file_format(path, source.format)
    assert kind is not None, f"{path} was let in without a known format"
    if (instead := mistaken(path, kind)) is not None:
        yield Unreadable(None, instead, lost=True)
        return
    yield from FORMATS[kind](path, source)


def python_records(path: Path) -> Records:
    """A Python source file as one document, in the encoding that it declares."""
    data = path.read_bytes()
    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(data).readline)
        yield None, PlainText(data.decode(encoding))
    except (SyntaxError, UnicodeDecodeError) as error:
        yield Unreadable(None, f"not in the encoding that it declares: {error}")


@contextmanager
def _text(path: Path) -> Iterator[io.TextIOWrapper]:
    """The file's text, decompressed, line ends as they are, without a byte order mark."""
    with io.TextIOWrapper(io.BufferedReader(open_stream(path)), "utf-8-sig", "surrogateescape", newline="\n") as text:
        yield text


@contextmanager
def _random_access(path: Path) -> Iterator[Any]:
    """The file as Arrow reads it at any place; a compressed one is unpacked into a temporary file first."""
    if path.suffix.lower() not in COMPRESSIONS:
        with map_file(path) as file:
            yield file
        return
    with tempfile.NamedTemporaryFile() as unpacked, open_stream(path) as stream:
        while data := stream.read(CHUNK):
            unpacked.write(data)
        unpacked.flush()
        with map_file(unpacked.name) as file:
            yield file


def _text_records(path: Path, source: FilesSource) -> Records:
    with _text(path) as stream:
        if source.separator is None:
            yield None, PlainText(stream.read())
            return
        number, rest = 0, ""
        while chunk := stream.read(CHUNK):
            *whole, rest = (rest + chunk).split(source.separator)
            for text in whole:
                number += 1
                yield number, PlainText(text)
        if rest:
            yield number + 1, PlainText(rest)


def _line_records(path: Path, source: FilesSource) -> Records:
    with _text(path) as stream:
        for number, line in enumerate(stream, 1):
            if not line.strip():
                continue
            try:
                yield number, json.loads(line)
            except (ValueError, RecursionError) as error:
                yield Unreadable(number, f"the line is not JSON: {error}")


def _json_records(path: Path, source: FilesSource) -> Records:
    """The elements of an array, or values one after another, without holding the whole file."""
    with _text(path) as stream:
        values = _JsonValues(stream)
        array = values.next_character(" \t\r\n") == "["
        values.position += array
        number = 0
        while (character := values.next_character(" \t\r\n," if array else " \t\r\n")) not in ("", "]"):
            number += 1
            try:
                yield number, values.value()
            except (ValueError, RecursionError) as error:
                yield Unreadable(number, f"not JSON from here on: {error}", lost=True)
                return
        if array != (character == "]"):
            reason = "the file ends inside an array" if array else "a ']' closes nothing"
            yield Unreadable(number + 1, reason, lost=True)


class _JsonValues:
    """JSON values one by one from a stream of text."""

    def __init__(self, stream: io.TextIOWrapper) -> None:
        self.stream, self.buffer, self.position, self.ended = stream, "", 0, False
        self.decoder = json.JSONDecoder()

    def next_character(self, skipped: str) -> str:
        """The next character that is none of `skipped`, not consumed; empty at the end."""
        while True:
            while self.position < len(self.buffer):
                if self.buffer[self.position] not in skipped:
                    return self.buffer[self.position]
                self.position += 1
            if self.ended:
                return ""
            self._fill()

    def value(self) -> Any:
        """The value that begins here; ValueError if there is none, however much is read."""
        while True:
            try:
                value, end = self.decoder.raw_decode(self.buffer, self.position)
                if end < len(self.buffer) or self.ended:
                    self.position = end
                    return value
            except ValueError:
                if self.ended or len(self.buffer) - self.position > LARGEST:
                    raise
            self._fill()

    def _fill(self) -> None:
        rest = self.buffer[self.position:]
        more = self.stream.read(max(CHUNK, len(rest)))  # doubling: a long value is tried a few times only
        self.buffer, self.position, self.ended = rest + more, 0, not more


def _csv_records(path: Path, source: FilesSource) -> Records:
    csv.field_size_limit(LARGEST)
    with _text(path) as stream:
        rows = csv.reader(stream, strict=True)
        header = next(rows, [])
        _check_columns(header, source)
        number = 0
        while True:
            try:
                row = next(rows)
            except StopIteration:
                return
            except csv.Error as error:
                number += 1
                yield Unreadable(number, f"the row is not CSV: {error}", lost="unexpected end" in str(error))
                continue
            if not row:
                continue
            number += 1
            if len(row) == len(header):
                yield number, dict(zip(header, row, strict=True))
            else:
                yield Unreadable(number, f"the row has {len(row)} values, the header {len(header)}")


def _parquet_records(path: Path, source: FilesSource) -> Records:
    import pyarrow.parquet as pq
    with _random_access(path) as file:
        parquet = pq.ParquetFile(file)
        columns = _check_columns(parquet.schema_arrow.names, source)
        first = 0
        for group in range(parquet.num_row_groups):
            rows, done = parquet.metadata.row_group(group).num_rows, 0
            try:
                for batch in parquet.iter_batches(ROWS, row_groups=[group], columns=columns):
                    for record in _batch_records(batch, first + done, source):
                        yield record
                        done += 1
            except damage() as error:
                yield Unreadable(first + done + 1, f"row group {group} cannot be read from here on: {error}",
                                 documents=rows - done)
            first += rows


def _arrow_records(path: Path, source: FilesSource) -> Records:
    """Both of Arrow's containers: the IPC file (record batches at any place) and the IPC stream."""
    import pyarrow as pa
    with _random_access(path) as file:
        is_file = file.read(6) == b"ARROW1"
        file.seek(0)
        reader = pa.ipc.open_file(file) if is_file else pa.ipc.open_stream(file)
        _check_columns(reader.schema.names, source)
        first = 0
        if not is_file:
            for batch in reader:
                yield from _batch_records(batch, first, source)
                first += batch.num_rows
            return
        for index in range(reader.num_record_batches):
            rows, done = 0, 0
            try:
                batch = reader.get_batch(index)
                rows = batch.num_rows
                for record in _batch_records(batch, first, source):
                    yield record
                    done += 1
            except damage() as error:
                yield Unreadable(first + done + 1, f"record batch {index} cannot be read from here on: {error}",
                                 documents=max(rows - done, 1), lost=rows == 0)
            first += rows


def _batch_records(batch: Any, first: int, source: FilesSource) -> Records:
    """The rows of an Arrow record batch, numbered from `first` + 1."""
    names = _wanted(source)
    for start in range(0, batch.num_rows, ROWS):
        part = batch.slice(start, ROWS)
        columns = [_strings(part.column(name), name) if name == source.text_field else part.column(name).to_pylist()
                   for name in names]
        for index, values in enumerate(zip(*columns, strict=True)):
            yield first + start + index + 1, dict(zip(names, values, strict=True))


def _strings(column: Any, name: str) -> list[str | None]:
    """A text column decoded value by value, so that one broken value does not cost the others."""
    import pyarrow as pa
    kinds = pa.types
    if kinds.is_dictionary(column.type):
        column = column.dictionary_decode()
    if kinds.is_string(column.type):
        column = column.view(pa.binary())
    elif kinds.is_large_string(column.type):
        column = column.view(pa.large_binary())
    elif kinds.is_string_view(column.type):
        column = column.cast(pa.large_string()).view(pa.large_binary())
    elif not (kinds.is_binary(column.type) or kinds.is_large_binary(column.type)):
        raise UnusableColumnsError(f"the column '{name}' holds {column.type}, not text")
    column.validate(full=True)  # offsets beyond the data would be a crash, not an error
    return [None if value is None else value.decode("utf-8", "surrogateescape") for value in column.to_pylist()]


def _wanted(source: FilesSource) -> list[str]:
    names = [source.text_field, *([source.id_field] if source.id_field else []), *source.meta_fields]
    return list(dict.fromkeys(names))


def _check_columns(present: list[str], source: FilesSource) -> list[str]:
    wanted = _wanted(source)
    if missing := [name for name in wanted if name not in present]:
        raise UnusableColumnsError(f"no column named {', '.join(missing)}; the columns are "
                                   f"{', '.join(present) or 'none'}")
    return wanted


FORMATS: dict[str, Callable[[Path, FilesSource], Records]] = {
    "txt": _text_records, "jsonl": _line_records, "json": _json_records, "csv": _csv_records,
    "parquet": _parquet_records, "arrow": _arrow_records}
