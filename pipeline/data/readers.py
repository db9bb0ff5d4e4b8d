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
import re
import tokenize
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path, PurePath
from typing import Any

import orjson

from drover.pipeline.config.data import FilesSource, ShardConfig
from drover.pipeline.data.columnar import arrow_records, check_columns, parquet_records, stored_columns, wanted_columns
from drover.pipeline.data.documents import Limit, PlainText, Records, Unreadable, damage
from drover.pipeline.data.file_kinds import mistaken
from drover.pipeline.data.streams import COMPRESSIONS, UTF8, Input, Piece, map_file, reach, separated
from drover.pipeline.storage.store import is_url

CHUNK = 1 << 20
"""Characters of a JSON file read at a time."""
_SPACE, _COMMAS, _DECODER = re.compile(r"[ \t\r\n]*"), re.compile(r"[ \t\r\n,]*"), json.JSONDecoder()
"""What JSON lets stand between values, and in an array."""
COLUMNAR = ("csv", "parquet", "arrow")
"""Formats that say once for a whole file which fields its records have."""
LONGEST_TOKEN = 100
"""Characters before the end of what was read in which an error may come of that end alone."""


HTML = ("html", "htm", "xhtml")
TEXT = ("md", "rst", "tex", "py", *HTML)
"""Endings that mean txt too."""


def file_format(path: PurePath, asked: str = "auto") -> str | None:
    """The format to read `path` as, by its ending unless asked for another; None if the ending says nothing."""
    if asked != "auto":
        return asked
    ending = _ending(path)
    return ending if ending in FORMATS else "txt" if ending in TEXT else None


def is_page(path: PurePath, asked: str = "auto") -> bool:
    """Whether a file would be read as text and is HTML by its name."""
    return file_format(path, asked) == "txt" and _ending(path) in HTML


def _ending(path: PurePath) -> str:
    """The ending of a file's name, before that of its compression, in small letters and without a dot."""
    inner = path.with_suffix("") if path.suffix.lower() in COMPRESSIONS else path
    return inner.suffix.lower().lstrip(".")


def divisible(path: PurePath, source: FilesSource) -> bool:
    """Whether parts of the file can be read by themselves; its name alone decides."""
    kind = file_format(path, source.format)
    if path.suffix.lower() in COMPRESSIONS or (source.encoding != UTF8 and kind != "parquet"):
        return False
    return kind in ("jsonl", "parquet") or (kind == "txt" and source.separator is not None)


def file_records(file: Input, source: FilesSource, limit: Limit) -> Records:
    """The records of one file of a `files` source, or of a part of one."""
    kind = file_format(file.path, source.format)
    assert kind is not None, f"{file.path} was let in without a known format"
    if (instead := mistaken(file, kind, source.html)) is not None:
        if file.piece.start == 0:  # said once for all parts
            yield Unreadable(None, instead, lost=True)
        return
    yield from FORMATS[kind](file, source, limit)


def column_names(path: Path, kind: str, encoding: str) -> list[str] | None:
    """The columns that a file of one of the COLUMNAR formats says it has, without reading what is in them; None where
    that cannot be seen so: it is damaged, packed or something else than its name says."""
    with suppress(*damage()):
        file = Input(Piece.of(path), encoding)
        if mistaken(file, kind) is not None:
            return None
        if kind == "csv":
            with _text(file) as stream:
                return next(csv.reader(_csv_lines(stream, Limit(1.0)), strict=True), None)
        if path.suffix.lower() not in COMPRESSIONS:
            with map_file(path) as data:
                return stored_columns(data, kind)
    return None


def absent_columns(config: ShardConfig, files: Sequence[tuple[str, str]]) -> list[str]:
    """What sources name as columns and none of their files has, as sentences. files: name, and path or URL.

    Only where all files of a source have columns that can be seen without reading them (CSV, Parquet, Arrow on this
    machine): as many are looked at as it takes to find each column once.
    """
    problems = []
    for source in config.sources:
        if not isinstance(source, FilesSource):
            continue
        absent, present = wanted_columns(source), list[str]()
        own = [path for name, path in files if name.startswith(f"{source.name}/")]
        for path in own:
            kind = file_format(PurePath(path), source.format)
            names = column_names(Path(path), kind, source.encoding) if kind in COLUMNAR and not is_url(path) else None
            absent = [name for name in absent if name not in names] if names is not None else []
            present = names or []
            if not absent:
                break
        if own and absent:
            problems.append(f"source {source.name}: none of its {len(own):,} files has a column named "
                            f"{', '.join(absent)}; the columns of {PurePath(own[-1]).name} are "
                            f"{', '.join(present) or 'none'}. Correct text_field, id_field or meta_fields.")
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
            record = orjson.loads(line)
            if source.id_field and isinstance(record, dict) and isinstance(record.get(source.id_field), float):
                record = json.loads(line)  # a whole number beyond 64 bits, which orjson makes a float
            yield place, record
            continue
        except orjson.JSONDecodeError:  # also for NaN, broken UTF-8 and half of a surrogate pair
            text = line.decode("utf-8", "surrogateescape")
        if text.strip():
            try:
                yield place, json.loads(text)
            except (ValueError, RecursionError) as error:
                yield Unreadable(place, f"the line is not JSON: {_said(error)}")


def _json_records(file: Input, source: FilesSource, limit: Limit) -> Records:
    """The elements of arrays, or values one after another, without holding the whole file."""
    with _text(file) as stream:
        text, number, within, wrong = _JsonText(stream), 0, "nothing", ""
        while not wrong and (character := text.next(_COMMAS if within == "array" else _SPACE)):
            if (character == "[" and within in ("nothing", "rest")) or (character == "]" and within == "array"):
                text.at += 1
                within = "array" if character == "[" else "rest"
            elif within == "rest" and character != "{":
                wrong = "something stands after the array's end"
            elif character == "]":
                wrong = "a ']' closes nothing"
            else:
                within = "array" if within == "array" else "values"
                number += 1
                try:
                    yield number, text.value(limit.bytes)
                except TooLongError:
                    yield limit.exceeded(number, lost=True)
                    return
                except (ValueError, RecursionError) as error:
                    yield Unreadable(number, f"not JSON from here on: {_said(error)}", lost=True)
                    return
        if wrong or within == "array":
            yield Unreadable(number + 1, wrong or "the file ends inside an array", lost=True)


def _said(error: ValueError | RecursionError) -> str:
    return "it is nested too deeply to be read" if isinstance(error, RecursionError) else str(error)


class TooLongError(Exception):
    """A value is longer than the limit."""


class _JsonText:
    """The text of a JSON file, of which some is held: `at` is where to read on in it."""

    def __init__(self, stream: io.TextIOWrapper) -> None:
        self._stream, self._held, self.at, self._ended = stream, "", 0, False

    def next(self, skipped: re.Pattern[str]) -> str:
        """The character at the next place where `skipped` ends; empty at the end."""
        while True:
            if match := skipped.match(self._held, self.at):
                self.at = match.end()
            if self.at < len(self._held) or self._ended:
                return self._held[self.at:self.at + 1]
            self._fill()

    def value(self, limit: int) -> Any:
        """The value that begins here; ValueError if there is none, TooLongError if it has no end within the limit."""
        while True:
            is_long = len(self._held) - self.at > limit
            try:
                value, end = _DECODER.raw_decode(self._held, self.at)
            except json.JSONDecodeError as error:
                may_be_cut = error.pos >= len(self._held) - LONGEST_TOKEN or error.msg.startswith("Unterminated string")
                if self._ended or (is_long and not may_be_cut):
                    raise
                if is_long:
                    raise TooLongError from None
            else:
                if end - self.at > limit:
                    raise TooLongError
                if end < len(self._held) or self._ended:
                    self.at = end
                    return value
            self._fill()

    def _fill(self) -> None:
        rest = self._held[self.at:]
        more = self._stream.read(max(CHUNK, len(rest)))  # doubling: a long value is tried a few times only
        self._held, self.at, self._ended = rest + more, 0, not more


def _csv_records(file: Input, source: FilesSource, limit: Limit) -> Records:
    csv.field_size_limit(limit.bytes)
    with _text(file) as stream:
        rows, number = csv.reader(_csv_lines(stream, limit), strict=True), 0
        try:
            header = next(rows, [])
            check_columns(header, source)
            while (row := _csv_row(rows)) is not None:
                if not row:
                    continue
                number += 1
                if isinstance(row, csv.Error):
                    yield Unreadable(number, f"the row is not CSV: {row}", lost="unexpected end" in str(row))
                elif len(row) == len(header):
                    yield number, dict(zip(header, row, strict=True))
                else:
                    yield Unreadable(number, f"the row has {len(row)} values, the header {len(header)}")
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


def _csv_row(rows: Any) -> list[str] | csv.Error | None:
    """The next row, or what is wrong with it; None at the end."""
    try:
        return next(rows, None)
    except csv.Error as error:
        if "field limit" in str(error):
            raise TooLongError from None
        return error


FORMATS: dict[str, Callable[[Input, FilesSource, Limit], Records]] = {
    "txt": _text_records, "jsonl": _line_records, "json": _json_records, "csv": _csv_records,
    "parquet": parquet_records, "arrow": arrow_records}
