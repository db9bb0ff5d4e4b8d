"""A stream of bytes into records: lines, and what stands between separators, of a whole file or of a part of it.

A part is a range of bytes [start, stop), a `Span`. Which part a record belongs to follows from the bytes around the two
ends of the range alone, so that parts that cover a file give its records once each, in order, without knowing of one
another. No record longer than `limit` is held: it comes as None, and the next one is looked for.

Every record comes with the offset of its first byte, counted as `start` is.
"""

from __future__ import annotations

import codecs
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from io import BufferedReader

CHUNK = 1 << 20
"""Bytes read at a time where nothing says how many."""
Framed = Iterator[tuple[int, bytes | None]]


@dataclass
class Span:
    """What a reader has to read: the bytes [start, stop) of a stream that stands at `start`.

    first: the file begins here. stop may be set lower while the stream is read, before anything behind it is.
    """

    start: int = 0
    stop: int = sys.maxsize
    first: bool = True


def lines(stream: BufferedReader, limit: int, span: Span) -> Framed:
    """The lines that begin in (start, stop], and the one that begins the file; each with its newline.

    A byte order mark at the file's beginning belongs to no line. Only b"\\n" ends a line.
    """
    at, mark = span.start, span.first
    if not span.first:
        skipped = _to_next_line(stream, at, span)
        if skipped is None:
            return
        at = skipped
    while at <= span.stop:
        line = stream.readline(limit + 1)
        if not line:
            return
        if mark:
            mark = False
            if line.startswith(codecs.BOM_UTF8):
                line = line[3:]
                line += b"" if line.endswith(b"\n") else stream.readline(3)
                at += 3
        if len(line) > limit and line[-1:] != b"\n":
            yield at, None
            skipped = _to_next_line(stream, at + len(line), span)
            if skipped is None:
                return
            at = skipped
        else:
            yield at, line
            at += len(line)


def _to_next_line(stream: BufferedReader, at: int, span: Span) -> int | None:
    """Pass over the rest of a line; where the next one begins, None where none does up to the end of the span."""
    while at < span.stop and (part := stream.readline(CHUNK)):
        at += len(part)
        if part[-1:] == b"\n":
            return at
    return None


def separated(stream: BufferedReader, limit: int, span: Span, separator: bytes) -> Framed:
    """What stands between separators, found from left to right without overlap; nothing after one that ends the file.

    Separators may overlap where one begins with what it ends with ("--" in "---"), and then which of them count depends
    on all before. One that no other reaches into from the left always counts, since any that counts before it
    ends before it. So a part begins after the first such *free* separator at or after start + len(separator) - 1, where
    what reaches into it can be seen from `start` on, and ends with the first at or after stop + len(separator) - 1.
    """
    size = len(separator)
    limit = max(limit, size)
    window, first = _Window(stream, span.start), span.first
    if not first:
        if not _to_free(window, separator, span):
            return
    elif window.startswith(codecs.BOM_UTF8):
        window.drop(3)
    while True:
        at, long = window.at, False
        while (place := window.find(separator)) < 0:
            if len(window) - size > limit:
                long = True
                window.drop(len(window) - size + 1)
                if window.at >= span.stop + 2 * size:  # a separator further on is free: it begins a later part
                    yield at, None
                    return
            if not window.grow():
                if long or len(window):
                    yield at, None if long or len(window) > limit else window.take(len(window))
                return
        free = first or long or place >= size or not _reaches_into(separator, window.peek(place))
        ends = free and window.at + place >= span.stop + size - 1
        yield at, None if long or place > limit else window.peek(place)
        if ends:
            return
        window.drop(place + size)
        first = False


def _reaches_into(separator: bytes, between: bytes) -> bool:
    """Whether a separator that begins inside of the first of two, which `between` parts, reaches into the second."""
    whole = separator + between + separator
    return whole.find(separator, len(between) + 1) < len(separator) + len(between)


def _to_free(window: _Window, separator: bytes, span: Span) -> bool:
    """Go to behind the first free separator of a part; False where it has none."""
    size = len(separator)
    known = span.start + size - 1
    before = -size  # offset of the last separator, counted or not
    while True:
        while (place := window.find(separator)) < 0:
            if window.at + len(window) >= span.stop + 2 * size:
                return False
            window.drop(max(0, len(window) - size + 1))
            if not window.grow():
                return False
        at = window.at + place
        if at >= span.stop + size - 1:
            return False
        if at >= known and at - before >= size:
            window.drop(place + size)
            return True
        before = at
        window.drop(place + 1)


class _Window:
    """The bytes of a stream that are looked at, from offset `at` on."""

    def __init__(self, stream: BufferedReader, at: int) -> None:
        self.at, self._stream, self._data, self._begin, self._searched = at, stream, b"", 0, 0

    def __len__(self) -> int:
        return len(self._data) - self._begin

    def find(self, separator: bytes) -> int:
        """Where the separator first stands in the window; -1 if nowhere. What was searched is not searched again."""
        found = self._data.find(separator, max(self._begin, self._searched))
        self._searched = len(self._data) - len(separator) + 1 if found < 0 else found
        return found - self._begin if found >= 0 else -1

    def startswith(self, mark: bytes) -> bool:
        while len(self) < len(mark) and self.grow():
            pass
        return self._data.startswith(mark, self._begin)

    def peek(self, count: int) -> bytes:
        return self._data[self._begin:self._begin + count]

    def drop(self, count: int) -> None:
        self._begin += count
        self.at += count

    def take(self, count: int) -> bytes:
        taken = self.peek(count)
        self.drop(count)
        return taken

    def grow(self) -> bool:
        """Read on, as much again as is there, so that a long record is copied a few times only; False at the end."""
        rest = self._data[self._begin:]
        more = self._stream.read1(max(CHUNK, len(rest)))
        self._data, self._searched, self._begin = rest + more, max(0, self._searched - self._begin), 0
        return bool(more)
