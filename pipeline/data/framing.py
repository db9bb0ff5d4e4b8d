"""Cut a stream of bytes into records at a separator: lines, or the texts between two separators.

A part of a file is a range of bytes [start, stop). It has the records that begin after the first free separator that
ends beyond `start`, up to the first one that ends beyond `stop`. A separator is free if no other one reaches into it
from the left, as "--" at offset 0 of "---" reaches into the one at offset 1. So the bytes around its two ends alone
decide what belongs to a part, and parts that cover a file give its records once each, in order.

No record longer than `limit` is held: it comes as None, and the next one is looked for.
"""

from __future__ import annotations

import codecs
import sys
from collections.abc import Iterator
from io import BufferedIOBase

CHUNK = 1 << 16
"""Bytes read at once."""
Records = Iterator[tuple[int, bytes | None]]


def reach(separator: bytes) -> int:
    """How many bytes before a part decide which separator is its first free one."""
    return 2 * len(separator) - 2


def separated(stream: BufferedIOBase, separator: bytes, limit: int, start: int = 0, stop: int = sys.maxsize) -> Records:
    """The records of the part [start, stop), each with the offset of its first byte; none after a separator that ends
    the file. A byte order mark at the beginning of the file is left out.

    stream: stands `reach(separator)` bytes before `start`, or at the beginning of the file.
    """
    size, before, own = len(separator), b"", start == 0
    at = begin = max(0, start - reach(separator))  # offsets of `rest` and of the record that it belongs to
    rest = _read(stream, len(codecs.BOM_UTF8)) if own else b""
    if rest.startswith(codecs.BOM_UTF8):
        at, begin, rest = at + 3, begin + 3, rest[3:]
    more = True
    while more:
        data = _read(stream, max(1, len(rest)))  # doubling: a long record is copied a few times only
        more = bool(data)
        *texts, rest = (rest + data).split(separator)
        for text in texts:
            end = at + len(text) + size
            if own:
                yield begin, None if at > begin or len(text) > limit else text
            if end > (stop if own else start) and _is_free(before + text, separator):
                if own or end > stop:
                    return
                own = True
            at, begin, before = end, end, separator
        if len(rest) > size + (limit if own else 0):
            dropped = len(rest) - size + 1
            at, rest, before = at + dropped, rest[dropped:], b""
            if at > stop + 2 * size:  # the next separator is a free one, and a later part begins there
                break
    if own and (rest or at > begin):
        yield begin, None if at > begin or len(rest) > limit else rest


def _is_free(before: bytes, separator: bytes) -> bool:
    """Whether no other separator reaches into the one that follows these bytes."""
    return (before + separator).find(separator, max(0, len(before) - len(separator) + 1)) == len(before)


def _read(stream: BufferedIOBase, least: int) -> bytes:
    """At least so many bytes, fewer at the end."""
    parts, size = list[bytes](), 0
    while size < least and (part := stream.read1(CHUNK)):
        parts.append(part)
        size += len(part)
    return b"".join(parts)
