"""Files into records: one generator per format, over plain, .gz and .zst files, each whole or a part of it.

A generator yields `(place, record)`, or a `Rejection` in its place. The place is the 1-based line or record number;
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
from collections.abc import Callable, Iterator
from pathlib import PurePath
from typing import IO, Any

import orjson

from drover.pipeline.config.data import COMPRESSIONS, FilesSource, file_format
from drover.pipeline.core.files import Record
from drover.pipeline.data.columnar import (
    arrow_records,
    check_columns,
    parquet_records,
)
from drover.pipeline.data.documents import (
    Limit,
    Page,
    Place,
    PlainText,
    Records,
    value_in,
)
from drover.pipeline.data.streams import HEAD, UTF8, Input, mistaken, separated
from drover.pipeline.data.warc import warc_records

CHUNK = 1 << 20
"""Characters of a JSON file read at a time."""
_SPACE = re.compile(r"[ \t\r\n\ufeff\x1e]*")
_COMMAS = re.compile(r"[ \t\r\n\ufeff\x1e,]*")
"""What may stand between JSON values, and in an array: also byte order marks, where files were appended to others, and
the record separators of JSON text sequences."""
WRAPPINGS = 8
"""Objects in one another that are searched for the list of a file's records."""
_DELIMITER = re.compile(rb"(?:\xef\xbb\xbf)?sep=([\t,;:|^~#])\r?\n", re.I)
"""A first line that names the delimiter, for Excel."""
LONGEST_TOKEN = 100
"""Characters before the end of what was read in which an error may come of that end alone."""


def divisible(path: PurePath, source: FilesSource) -> bool:
    """Whether parts of the file can be read by themselves; its name alone decides."""
    kind = file_format(path, source.format)
    if path.suffix.lower() in COMPRESSIONS or (source.encoding != UTF8 and kind != "parquet"):
        return False
    return kind in ("jsonl", "parquet")


def file_records(file: Input, source: FilesSource, limit: Limit) -> Records:
    """The records of one file of a `files` source, or of a part of one. Only text has one in an empty file."""
    kind = file_format(file.path, source.format)
    assert kind is not None, f"{file.path} was let in without a known format"
    if kind == "html" and source.html == "keep":
        kind = "txt"
    if kind in ("warc", "pdf"):
        file.encoding = UTF8  # bytes as they are
    instead, head = mistaken(file, kind, source.html)
    if instead is not None:
        if file.piece.start == 0:  # said once for all parts
            yield file.reject(None, instead, lost=True, lost_bytes=file.piece.bytes)
    elif kind == "txt" or head != b"":
        file.head = head or b""
        yield from FORMATS[kind](file, source, limit)


def python_records(file: Input, limit: Limit) -> Records:
    """A Python source file as one document, in the encoding that it declares."""
    size = file.piece.bytes
    if size > limit.bytes:
        yield file.reject(None, limit.reason, lost_bytes=size)
        return
    with file.open() as stream:
        data = stream.read()
    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(data).readline)
        yield None, PlainText(data.decode(encoding))
    except (SyntaxError, UnicodeDecodeError) as error:
        yield file.reject(None, f"not in the encoding that it declares: {error}", lost_bytes=size)


def _text_records(file: Input, source: FilesSource, limit: Limit) -> Records:
    data: bytes | int = b""
    file.current = lambda: data if isinstance(data, int) else len(data)
    if source.separator is None:
        with file.open() as stream:
            text = data = stream.read(limit.bytes + 4).removeprefix(codecs.BOM_UTF8)
        too_long = len(text) > limit.bytes
        yield file.reject(None, limit.reason, lost_bytes=file.give_up(0)) if too_long else (None, _plain_text(text))
        return
    number = end = 0
    for number, (offset, data) in enumerate(
            _separated(file, source.separator.encode("utf-8", "surrogatepass"), limit), 1):
        end = offset + (data if isinstance(data, int) else len(data))
        if isinstance(data, int):
            yield file.reject(number, limit.reason, lost_bytes=data)
            continue
        yield number, _plain_text(data)
    if number:
        file.about.separated = number > 1 or end < file.content


def _page_records(file: Input, source: FilesSource, limit: Limit) -> Records:
    """An HTML or PDF file as one page."""
    with file.open() as stream:
        data = stream.read(limit.bytes + 1)
    file.current = lambda: len(data)
    kind = file_format(file.path, source.format) or ""
    yield file.reject(None, limit.reason, lost_bytes=file.give_up(0)) if len(data) > limit.bytes else \
        (None, Page(data, kind, "" if source.encoding == UTF8 else UTF8))


def _plain_text(data: bytes) -> PlainText:
    return PlainText(data.decode("utf-8", "surrogateescape"))


def _separated(file: Input, separator: bytes, limit: Limit) -> Iterator[tuple[int, bytes | int]]:
    """The records of a file or a part with their offsets; of a record that is too long its length."""
    piece = file.piece
    with file.open() as stream:
        yield from separated(stream, separator, limit.bytes, *(() if piece.is_complete else (piece.start, piece.stop)))


def _line_records(file: Input, source: FilesSource, limit: Limit) -> Records:
    """The values of lines, which may end in CR alone; where the file's first bytes are other JSON, its values."""
    if _is_other_json(file.head):
        if file.piece.start == 0:  # it has no parts
            yield from _json_records(file, source, limit)
        return
    field = source.text_field
    is_nested = "." in source.text_field
    is_complete = file.piece.is_complete
    line: bytes | int = b""

    def current() -> int:
        return line if isinstance(line, int) else len(line) + 1
    file.current = current
    for number, (offset, line) in enumerate(_separated(file, b"\r" if _ends_in_cr(file.head) else b"\n", limit), 1):
        place = number if is_complete else str(offset)
        if isinstance(line, int):
            yield file.reject(place, limit.reason, lost_bytes=line)
            continue
        try:
            record = orjson.loads(line)
            if source.id_field and isinstance(record, dict) and isinstance(record.get(source.id_field), float):
                record = json.loads(line)  # a whole number beyond 64 bits, which orjson makes a float
        except orjson.JSONDecodeError:  # also for NaN, broken UTF-8 and half of a surrogate pair
            record = None
        if type(record) is dict and field:
            text = value_in(record, field) if is_nested else record.get(field)
            if type(text) is str:
                yield place, record
                continue
        elif record is not None and not field:
            yield place, record
            continue
        end = file.piece.bytes if file.is_plain else file.content
        alone = offset <= len(codecs.BOM_UTF8) and offset + len(line) + len(b'{"a":""}') >= end
        yield from _odd_line(file, place, line.decode("utf-8", "surrogateescape"), field, alone)
        file.current = current


def _ends_in_cr(head: bytes) -> bool:
    """Whether lines end in CR alone, as on old Macs."""
    return b"\r" in head and b"\n" not in head


def _is_other_json(head: bytes) -> bool:
    """Whether a file of JSON lines has, by its first bytes, an array or values of several lines or several on one."""
    text = head.decode("utf-8", "replace").lstrip("\ufeff \t\r\n")
    try:
        end = _DECODER.raw_decode(text)[1]
    except json.JSONDecodeError as error:
        is_cut = error.msg.startswith("Unterminated string") or error.pos >= len(text.rstrip()) - len("false,")
        return len(head) == HEAD and is_cut and (text.startswith("[") or "\n" in text)
    except RecursionError:
        return False
    return "\n" in text[:end] or ("\n" not in text and text[end:].lstrip(" \t,").startswith(("{", "[")))


def _odd_line(file: Input, place: Place, line: str, field: str, alone: bool) -> Records:
    """The records of a line that is not simply one of them. alone: the rest of the file has no room for another."""
    if not line.strip():
        return
    try:
        values = list(_values_of(line))
    except (ValueError, RecursionError) as error:
        yield file.reject(place, f"the line is not JSON: {_json_problem(error)}", lost_bytes=file.current())
        return
    for record in _records_of(file, values, field, alone and len(values) == 1):
        yield place, record


def _values_of(line: str) -> Iterator[Any]:
    """Its value; or its objects and arrays, of which no line break is between one and the next."""
    at = _skip(line, 0)
    count = 0
    while at < len(line):
        value, at = _DECODER.raw_decode(line, at)
        at, count = _skip(line, at), count + 1
        if (count > 1 or at < len(line)) and not isinstance(value, (dict, list)):
            raise ValueError("a value that is no object is not alone in its line")
        yield value


def _skip(text: str, at: int) -> int:
    match = _COMMAS.match(text, at)
    assert match is not None  # it matches nothing, too
    return match.end()


def _records_of(file: Input, values: list[Any], field: str, alone: bool) -> list[Any]:
    """These values, together the file's current record, as records: the items of a list of records in place of it;
    where the file holds one value alone, also the items of a list within it."""
    records = [own for value in values
               for own in (value if isinstance(value, list) and _are_records(value, field) else [value])]
    if alone and field and isinstance(values[0], dict) and value_in(values[0], field) is None:
        lists = list(lists_of_records(values[0], field, ""))
        if len(lists) == 1:
            [(_, records)] = lists
    if len(records) > 1:
        size = file.current()
        file.current = lambda: size // len(records)
    return records


def lists_of_records(value: Record, field: str, path: str) -> Iterator[tuple[str, list[Any]]]:
    """The lists of records with text within an object, and the dotted names of the fields in which they stand."""
    for name, own in value.items():
        inner = f"{path}.{name}" if path else name
        if isinstance(own, list) and _are_records(own, field):
            yield inner, own
        elif isinstance(own, dict) and inner.count(".") < WRAPPINGS:
            yield from lists_of_records(own, field, inner)


def _are_records(values: list[Any], field: str) -> bool:
    return bool(field) and any(isinstance(own, dict) and value_in(own, field) is not None for own in values)


_DECODER = json.JSONDecoder()


def _json_records(file: Input, source: FilesSource, limit: Limit) -> Records:
    """The elements of arrays, or values one after another, without holding the whole file."""
    with file.open() as stream:
        text = _JsonText(stream)
        number = 0
        within = "nothing"
        wrong = ""
        file.current = text.current
        while not wrong and (character := text.next(_SPACE if within == "rest" else _COMMAS)):
            if (character == "[" and within in ("nothing", "rest")) or (character == "]" and within == "array"):
                text.at += 1
                within = "array" if character == "[" else "rest"
            elif within == "rest" and character != "{":
                wrong = "something stands after the array's end"
            elif character == "]":
                wrong = "a ']' closes nothing"
            else:
                within = "array" if within == "array" else "values"
                try:
                    value = text.value(limit.bytes)
                except TooLongError:
                    hint = "" if number or within == "array" else ("; where it holds the records in a field, take them "
                                                                   "out (jq -c '.FIELD[]' FILE.json > FILE.jsonl)")
                    wrong = limit.reason + hint
                    break
                except (ValueError, RecursionError) as error:
                    wrong = f"not JSON from here on: {_json_problem(error)}"
                    break
                alone = number == 0 and within == "values" and not text.next(_SPACE)
                for record in _records_of(file, [value], source.text_field, alone):
                    number += 1
                    yield number, record
                file.current = text.current
        if wrong or within == "array":
            yield file.reject(number + 1, wrong or "the file ends inside an array", lost=True,
                             lost_bytes=file.give_up(file.content - text.ahead()))


def _json_problem(error: ValueError | RecursionError) -> str:
    return "it is nested too deeply to be read" if isinstance(error, RecursionError) else str(error)


class TooLongError(Exception):
    """A value is longer than the limit."""


class _JsonText:
    """The text of a JSON file, of which some is held: `at` is where to read on in it, `last` the last value's text."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream
        self._held = ""
        self.at = 0
        self._ended = False
        self._decoder = codecs.getincrementaldecoder("utf-8-sig")("surrogateescape")
        self.last = ""

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
                    self.last, self.at = self._held[self.at:end], end
                    return value
            self._fill()

    def current(self) -> int:
        """Bytes of the last value."""
        return len(self.last.encode("utf-8", "surrogateescape"))

    def ahead(self) -> int:
        """Bytes of what was read from here on."""
        return len(self._held[self.at:].encode("utf-8", "surrogateescape"))

    def _fill(self) -> None:
        rest = self._held[self.at:]
        data = self._stream.read(max(CHUNK, len(rest)))  # doubling: a long value is tried a few times only
        self._held, self.at, self._ended = rest + self._decoder.decode(data, final=not data), 0, not data


def _csv_records(file: Input, source: FilesSource, limit: Limit) -> Records:
    csv.field_size_limit(limit.bytes)
    size = [0]
    number = 0
    file.current = lambda: size[0]
    with _text(file) as stream:
        rows = _csv_reader(file, source, _csv_lines(stream, limit, size))
        try:
            if (header := next(filter(None, rows), None)) is None:
                return
            check_columns(header, source)
            size[0] = 0
            while (row := _csv_row(rows)) is not None:
                if row:
                    number += 1
                    if isinstance(row, csv.Error):
                        yield file.reject(number, f"the row is not CSV: {row} (where quotation marks are text, set the "
                                                 f"source's `quote: \"\"`)", lost="unexpected end" in str(row),
                                         lost_bytes=size[0])
                    elif len(row) == len(header):
                        yield number, dict(zip(header, row, strict=True))
                    else:
                        yield file.reject(number, f"the row has {len(row)} values, the header {len(header)}",
                                         lost_bytes=size[0])
                size[0] = 0
        except TooLongError:
            yield file.reject(number + 1, limit.reason, lost=True,
                              lost_bytes=file.give_up(max(0, file.content - size[0])))


def _text(file: Input) -> io.TextIOWrapper:
    """The file as text, without a byte order mark and with its line ends as they are."""
    newline = "" if re.search(rb"\r(?!\n)", file.head) else "\n"  # "" takes longer
    return io.TextIOWrapper(file.open(), "utf-8-sig", "surrogateescape", newline=newline)


def _csv_reader(file: Input, source: FilesSource, lines: Iterator[str]) -> Any:
    is_tsv = ".tsv" in [ending.lower() for ending in file.path.suffixes[-2:]]
    quotes: dict[str, Any] = {"quotechar": source.quote} if source.quote else {"quoting": csv.QUOTE_NONE}
    usual = "\t" if is_tsv else ","
    if named := _DELIMITER.match(file.head):
        usual = named[1].decode()
        next(lines)
    return csv.reader(lines, strict=True, delimiter=source.delimiter or usual, **quotes)


def _csv_lines(stream: io.TextIOWrapper, limit: Limit, size: list[int]) -> Iterator[str]:
    """The lines, whose bytes are added to `size`; it is 0 where a row begins, and there a byte order mark is left
    out."""
    while line := stream.readline(limit.bytes + 1):
        if not size[0]:
            line = line.removeprefix("\ufeff")
        size[0] += len(line) if line.isascii() else len(line.encode("utf-8", "surrogateescape"))
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
    "parquet": parquet_records, "arrow": arrow_records, "html": _page_records, "pdf": _page_records,
    "warc": warc_records}
