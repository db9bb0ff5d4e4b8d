"""What a reader gives: records, what could not be read, and the limit of a document's size."""

from __future__ import annotations

import csv
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from drover.pipeline.errors import is_full_disk

Place = int | str | None
"""1-based line or record number; in a part of a file what stands after the `@` of an id; None for a file as a whole."""


@dataclass(frozen=True)
class Unreadable:
    """In place of a record: what is wrong, how many documents it costs, and whether unknown more are lost."""

    place: Place
    reason: str
    documents: int = 1
    lost: bool = False


class PlainText(str):
    """A record without fields: all of it is the document's text. (A string in a JSON file is none.)"""


Records = Iterator[tuple[Place, Any] | Unreadable]


class UnusableColumnsError(Exception):
    """A columnar file has not the columns that the source names."""


def damage() -> tuple[type[Exception], ...]:
    """Exceptions that a damaged file causes in the readers. Others raise them too: see `raise_unless_damage`."""
    import pyarrow as pa
    return (OSError, EOFError, zlib.error, UnicodeDecodeError, csv.Error, pa.ArrowException, UnusableColumnsError)


def is_shortage(error: BaseException) -> bool:
    """Whether memory or a disk ran out, which Arrow and numpy tell by exceptions of the same kinds as damage."""
    return isinstance(error, MemoryError) or is_full_disk(error)


def raise_unless_damage(error: Exception) -> None:
    """Raise one of `damage()` again where it tells of this machine and not of the data: a shortage, or an OSError with
    an errno. Taken for damage, it would be recorded as lost data for good."""
    if is_shortage(error) or (isinstance(error, OSError) and error.errno is not None):
        raise error


@dataclass(frozen=True)
class Limit:
    """The largest document: a record as it stands in its file, unpacked, and a text in UTF-8."""

    megabytes: float

    @cached_property
    def bytes(self) -> int:
        """The limit in bytes."""
        return int(self.megabytes * 1e6)

    @property
    def reason(self) -> str:
        """What is said of a longer document."""
        return f"longer than shard.max_document_mb ({self.megabytes:g} MB) allows"

    def exceeded(self, place: Place, *, lost: bool = False) -> Unreadable:
        """In place of a longer document."""
        return Unreadable(place, self.reason, lost=lost)

    def allows(self, text: str) -> bool:
        """Whether a text is short enough."""
        most = self.bytes
        return len(text) * 4 <= most or (len(text) <= most and len(text.encode("utf-8", "surrogatepass")) <= most)
