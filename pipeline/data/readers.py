"""Files into records: one generator per format, over plain, .gz and .zst files, each whole or a part of it.

A generator yields `(place, record)`, or an `Unreadable` in its place. The place is the 1-based line or record number;
in a part of a file, where nobody knows it, what stands after the `@` of a document's id: the offset of the record's
first byte as text; None where the file is one document. Damage that ends the file is raised as one of `damage()`. Text
is decoded with `surrogateescape`, so a broken byte costs its own record, not the rest of the file: whoever encodes the
record again finds it.

A record longer than the limit costs itself, without being held, and what follows it where the format has no mark of a
record's end that can be found from inside of it.
"""

from __future__ import annotations

import codecs
import csv
import io
import json
import tokenize
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path, PurePath
from typing import Any

import orjson

from pipeline.config.data import FilesSource, ShardConfig
from pipeline.data.columnar import arrow_records, check_columns, parquet_records, stored_columns, wanted_columns
from pipeline.data.file_kinds import mistaken
from pipeline.data.framing import reach, separated
from pipeline.data.records import Limit, PlainText, Records, Unreadable, damage
from pipeline.data.streams import COMPRESSIONS, Input, Piece, map_file
from pipeline.stores.object_files import InputFile

CHUNK = 1 << 20
"""Characters of a JSON file read at a time."""
SPACE = " \t\r\n"
"""What JSON lets stand between values."""
COLUMNAR = ("csv", "parquet", "arrow")
"""Formats that say once for a whole file which fields its records have."""
LONGEST_TOKEN = 100
"""Characters before the end of what was read in which an error may come of that end alone."""


def file_format(path: PurePath, asked: str = "auto") -> str | None:
    """The format to read `path` as, by its ending unless asked for another; None if the ending says nothing."""
    if asked != "auto":
        return asked
    inner = path.with_suffix("") if path.suffix.lower() in COMPRESSIONS else path
    ending = inner.suffix.lower().lstrip(".")
    return ending if ending in FORMATS else None


def divisible(path: PurePath, source: FilesSource) -> bool:
    """Whether parts of the file can be read by themselves; its name alone decides."""
    kind = file_format(path, source.format)
    return path.suffix.lower() not in COMPRESSIONS and (
        kind in ("jsonl", "parquet") or (kind == "txt" and source.separator is not None))


def file_records(file: Input, source: FilesSource, limit: Limit) -> Records:
    """The records of one file of a `files` source, or of a part of one."""
    kind = file_format(file.path, source.format)
    assert kind is not None, f"{file.path} was let in without a known format"
    if (instead := mistaken(file.reader or Path(file.path), kind)) is not None:
        if file.piece.start == 0:  # said once for all parts
            yield Unreadable(None, instead, lost=True)
        return
    yield from FORMATS[kind](file, source, limit)


def column_names(path: Path, kind: str) -> list[str] | None:
    """The columns that a file says it has, without reading what is in them; None where that cannot be seen so: it is
    damaged, packed or something else than its name says."""
    if mistaken(path, kind) is not None:
        return None
    if kind == "csv":
        with suppress(*damage()), _text(Input(Piece.of(path))) as stream:
            return next(csv.reader(_csv_lines(stream, Limit(1.0)), strict=True), None)
        return None
    if kind not in ("parquet", "arrow") or path.suffix.lower() in COMPRESSIONS:
        return None
    with suppress(*damage()), map_file(path) as data:
        return stored_columns(data, kind)
    return None


def absent_columns(config: ShardConfig, files: Sequence[tuple[str, InputFile]]) -> list[str]:
    """What sources name as columns and none of their files has, as sentences.

    Only where all files of a source have columns that can be seen without reading them (CSV, Parquet, Arrow on this
    machine): as many are looked at as it takes to find each column once.
    """
    problems = []
    for source in config.sources:
        if not isinstance(source, FilesSource):
            continue
        missing, present, looked, last = set(wanted_columns(source)), list[str](), 0, ""
        for path in (path for name, path in files if name.startswith(f"{source.name}/")):
            kind = file_format(path, source.format) if isinstance(path, Path) else None
            names = column_names(path, kind) if isinstance(path, Path) and kind in COLUMNAR else None
            if names is None:
                break
            missing.difference_update(names)
            present, looked, last = names, looked + 1, path.name
            if not missing:
                break
        else:
            if not looked:
                continue
            absent = [name for name in wanted_columns(source) if name in missing]
            problems.append(f"source {source.name}: none of its {looked:,} files has a column named "
                            f"{', '.join(absent)}; the columns of {last} are {', '.join(present) or 'none'}. Correct "
                            f"text_field, id_field or meta_fields.")
    return problems


def python_records(file: Input, limit: Limit) -> Records:
    """A Python source file as one document, in the encoding that it declares."""
    if file.piece.bytes > limit.bytes:
        yield limit.exceeded(None)
        return
    with file.open() as stream:
        data = stream.read()
    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(data).readline)
        yield None, PlainText(data.decode(encoding))
    except (SyntaxError, UnicodeDecodeError) as error:
        yield Unreadable(None, f"not in the encoding that it declares: {error}")


def _text_records(file: Input, source: FilesSource, limit: Limit) -> Records:
    if source.separator is None:
        with file.open() as stream:
            text = stream.read(limit.bytes + 4).removeprefix(codecs.BOM_UTF8)
        yield limit.exceeded(None) if len(text) > limit.bytes else (None, _plain_text(text))
        return
    for place, data in _separated(file, source.separator.encode("utf-8", "surrogatepass"), limit):
        yield limit.exceeded(place) if data is None else (place, _plain_text(data))


def _plain_text(data: bytes) -> PlainText:
    return PlainText(data.decode("utf-8", "surrogateescape"))


def _separated(file: Input, separator: bytes, limit: Limit) -> Iterator[tuple[int | str, bytes | None]]:
    """Records of a file with their numbers, or of a part with their offsets."""
    piece = file.piece
    with file.open(reach(separator)) as stream:
        if piece.whole:
            yield from enumerate((data for _, data in separated(stream, separator, limit.bytes)), 1)
            return
        for offset, data in separated(stream, separator, limit.bytes, piece.start, piece.stop):
            yield str(offset), data


def _line_records(file: Input, source: FilesSource, limit: Limit) -> Records:
    for place, line in _separated(file, b"\n", limit):
        if line is None:
            yield limit.exceeded(place)
            continue
        try:
            yield place, orjson.loads(line)
            continue
        except orjson.JSONDecodeError:  # also for NaN, broken UTF-8 and half of a surrogate pair
            text = line.decode("utf-8", "surrogateescape")
        if text.strip():
            try:
                yield place, json.loads(text)
            except (ValueError, RecursionError) as error:
                yield Unreadable(place, f"the line is not JSON: {error}")


def _json_records(file: Input, source: FilesSource, limit: Limit) -> Records:
    """The elements of arrays, or values one after another, without holding the whole file."""
    with _text(file) as stream:
        values, number, wrong = _JsonValues(stream, limit), 0, ""
        array = values.begins_array()
        while not wrong and (character := values.next_character(f"{SPACE}," if array else SPACE)):
            if character == "]":
                if array:
                    array, wrong = values.end_array()
                else:
                    wrong = "a ']' closes nothing"
                continue
            number += 1
            try:
                yield number, values.value()
            except TooLongError:
                yield limit.exceeded(number, lost=True)
                return
            except (ValueError, RecursionError) as error:
                yield Unreadable(number, f"not JSON from here on: {error}", lost=True)
                return
        if wrong or array:
            yield Unreadable(number + 1, wrong or "the file ends inside an array", lost=True)


class TooLongError(Exception):
    """A value goes on beyond the limit."""


class _JsonValues:
    """JSON values one by one from a stream of text."""

    def __init__(self, stream: io.TextIOWrapper, limit: Limit) -> None:
        self.stream, self.buffer, self.position, self.ended = stream, "", 0, False
        self.limit = limit
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

    def begins_array(self) -> bool:
        """Whether an array begins here; then goes on to what it holds."""
        begins = self.next_character(SPACE) == "["
        self.position += begins
        return begins

    def end_array(self) -> tuple[bool, str]:
        """Go on behind a ]: whether another array begins there, as in files that were joined, and what is wrong."""
        self.position += 1
        after = self.next_character(SPACE)
        return self.begins_array(), "" if after in ("", "[", "{") else "something stands after the array's end"

    def value(self) -> Any:
        """The value that begins here; ValueError if there is none, TooLongError if it has no end within the limit."""
        while True:
            try:
                value, end = self.decoder.raw_decode(self.buffer, self.position)
                if end - self.position > self.limit.bytes:
                    raise TooLongError
                if end < len(self.buffer) or self.ended:
                    self.position = end
                    return value
            except json.JSONDecodeError as error:
                wrong = error.pos < len(self.buffer) - LONGEST_TOKEN and not error.msg.startswith("Unterminated string")
                if self.ended or (wrong and self._is_long()):
                    raise
                if self._is_long():
                    raise TooLongError from None
            self._fill()

    def _is_long(self) -> bool:
        return len(self.buffer) - self.position > self.limit.bytes

    def _fill(self) -> None:
        rest = self.buffer[self.position:]
        more = self.stream.read(max(CHUNK, len(rest)))  # doubling: a long value is tried a few times only
        self.buffer, self.position, self.ended = rest + more, 0, not more


def _csv_records(file: Input, source: FilesSource, limit: Limit) -> Records:
    csv.field_size_limit(limit.bytes)
    with _text(file) as stream:
        rows = csv.reader(_csv_lines(stream, limit), strict=True)
        number = 0
        try:
            header = next(rows, [])
            check_columns(header, source)
            while True:
                try:
                    row = next(rows)
                except csv.Error as error:
                    if "field limit" in str(error):
                        raise TooLongError from None
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
        except StopIteration:
            return
        except TooLongError:
            yield limit.exceeded(number + 1, lost=True)


def _text(file: Input) -> io.TextIOWrapper:
    """The file as text, without a byte order mark and with its line ends as they are."""
    return io.TextIOWrapper(file.open(), "utf-8-sig", "surrogateescape", newline="\n")


def _csv_lines(stream: io.TextIOWrapper, limit: Limit) -> Iterator[str]:
    while line := stream.readline(limit.bytes + 1):
        if len(line) > limit.bytes:
            raise TooLongError
        yield line


FORMATS: dict[str, Callable[[Input, FilesSource, Limit], Records]] = {
    "txt": _text_records, "jsonl": _line_records, "json": _json_records, "csv": _csv_records,
    "parquet": parquet_records, "arrow": arrow_records}
