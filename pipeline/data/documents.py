"""A record of a file, the document that it is, what becomes of it in a text shard; and what could not be read."""

from __future__ import annotations

import csv
import hashlib
import json
import math
import zlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from math import ceil
from typing import Any

import orjson

from drover.pipeline.core.errors import is_full_disk
from drover.pipeline.core.files import Record

Place = int | str | None
"""1-based line or record number; in a part of a file, the text after the `@` of an id; None for the whole file."""


class PlainText(str):
    """A record without fields: all of it is the document's text. (A string in a JSON file is none.)"""


@dataclass(frozen=True)
class Page:
    """A record whose text has to be taken out of it (`extraction.py`).

    Attributes:
        data: what the file holds.
        kind: `html`, `text` or `pdf`.
        charset: its encoding, if something outside of it says so.
        meta: what is known of it.
    """

    data: bytes
    kind: str = "html"
    charset: str = ""
    meta: Record = field(default_factory=dict)


class UnusableColumnsError(Exception):
    """A columnar file has not the columns that the source names."""


def damage() -> tuple[type[Exception], ...]:
    """Exceptions that a damaged file causes in the readers. Others raise them too: see `raise_unless_damage`."""
    import pyarrow as pa
    return (OSError, EOFError, zlib.error, UnicodeDecodeError, csv.Error, pa.ArrowException, UnusableColumnsError)


def is_shortage(error: BaseException) -> bool:
    """Whether memory or a disk ran out. Arrow and numpy raise the same exceptions for that as for damage."""
    return isinstance(error, MemoryError) or is_full_disk(error)


def raise_unless_damage(error: Exception) -> None:
    """Raise one of `damage()` again if its cause is this machine and not the data: a shortage, or an OSError with an
    errno. Otherwise the data would be recorded as lost for good."""
    if is_shortage(error) or (isinstance(error, OSError) and error.errno is not None):
        raise error


@dataclass(frozen=True)
class Limit:
    """The size of the largest document: of its record, unpacked, and of its text in UTF-8."""

    megabytes: float

    @cached_property
    def bytes(self) -> int:
        """The limit in bytes."""
        return int(self.megabytes * 1e6)

    @property
    def reason(self) -> str:
        """Why a longer document is rejected."""
        return f"longer than shard.max_document_mb ({self.megabytes:g} MB) allows"

    def allows(self, text: str) -> bool:
        """Whether a text is short enough."""
        most = self.bytes
        return len(text) * 4 <= most or (len(text) <= most and len(text.encode("utf-8", "surrogatepass")) <= most)


DIGEST_BYTES = 16


@dataclass(frozen=True)
class Document:
    """One text of the corpus.

    Attributes:
        text: the text, never empty.
        source: name of the source it came from.
        id: its own id, or the file's name and the record's number.
        meta: further fields of the record; plain JSON values.
        key: its name in a shard, see `document_key`; empty before it is in one.
        place: where it was read, where its id does not say so: file and record as in such an id.
    """

    text: str
    source: str
    id: str
    meta: Record
    key: str = ""
    place: str = field(default="", compare=False)

    def with_text(self, text: str) -> Document:
        """The document with another text; itself if that is the same, which shows that nothing was changed."""
        return self if text == self.text else replace(self, text=text)


@dataclass(frozen=True)
class Rejection:
    """What could not be read or is no document: one line of `rejected.jsonl`.

    Attributes:
        source: name of the source.
        file: the input file, by its name within the source.
        record: 1-based line or record in the file; text: in a file that is read in parts, the offset of its first byte
            (in an Arrow file the batch and the row in it); None where the file as a whole is meant.
        reason: what is wrong with it.
        documents: how many documents are lost; 0 for a page that is passed over, or a document without text.
        lost: an unknown number of documents is lost beyond that: the file breaks off or cannot be opened.
        lost_bytes: of the unpacked file; 0 where nobody knows.
        url: of a page.
    """

    source: str
    file: str
    record: Place
    reason: str
    documents: int = 1
    lost: bool = False
    lost_bytes: int = 0
    url: str = ""

    def line(self) -> bytes:
        """The rejection as a line of JSON; broken bytes in names show as escapes."""
        return (json.dumps(asdict(self)) + "\n").encode()

    def __str__(self) -> str:
        return f"{place_in(self.file, self.record)}: {self.reason}"


Records = Iterator[tuple[Place, Any] | Rejection]
"""Records of a file, each with its place, or what is wrong with one."""


def place_in(file: str, record: Place) -> str:
    """What a record of a file is called: `file:7` by number, `file@1234` by offset."""
    return file if record is None else f"{file}{'@' if isinstance(record, str) else ':'}{record}"


def digest(text: bytes | memoryview) -> bytes:
    """What identifies a document's text, or its ids: the first 16 bytes of the sha256."""
    return hashlib.sha256(text).digest()[:DIGEST_BYTES]


def validation_below(share: float) -> int:
    """The high half of a digest is held out below this: share * 2^64, which is exact."""
    return ceil(share * 2**64)


def document_key(text_digest: bytes, copy: int = 0) -> str:
    """A document's name in a shard: the digest in hex, without dots, and how many equal texts the shard has before."""
    return text_digest.hex() + (f"-{copy}" if copy else "")


def key_fits(document: Document) -> bool:
    """Whether the text is still the one that the key was made of."""
    return document.key.partition("-")[0] == digest(document.text.encode()).hex()


def as_values(document: Document) -> Record:
    """The document as JSON's values."""
    return {"text": document.text, "source": document.source, "id": document.id, "meta": document.meta,
            **({"place": document.place} if document.place else {})}


def to_json(document: Document) -> bytes:
    """The document as the `.json` member of a shard.

    Raises:
        UnicodeEncodeError: a text in it is not valid Unicode.
        TypeError, RecursionError: its meta holds something else than JSON's own types, or is nested too deeply.
    """
    value = as_values(document)
    try:
        return orjson.dumps(value)
    except orjson.JSONEncodeError as error:
        json.dumps(value, ensure_ascii=False).encode()  # says where a text is not valid Unicode
        raise (RecursionError if "Recursion" in str(error) else TypeError)(str(error)) from None


def from_json(member: bytes, key: str) -> Document:
    """The document of a shard's `.json` member; ValueError, KeyError or TypeError if it is none."""
    value = orjson.loads(member)
    document = Document(value["text"], value["source"], value["id"], value["meta"], key, value.get("place", ""))
    if not (isinstance(document.text, str) and isinstance(document.source, str)):
        raise TypeError("text and source must be strings")
    return document


def value_in(record: Record, name: str, *, also_meta: bool = False) -> Any:
    """The value of the field of that name, or of one in nested objects, as `content.text`; None if there is none.
    also_meta: else of one in the object `meta`, where text shards have it."""
    if name in record:
        return record[name]
    value: Any = record
    for part in name.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    meta = record.get("meta")
    return meta.get(name) if also_meta and value is None and isinstance(meta, dict) else value


def plain(value: Any) -> Any:
    """`value` in JSON's own types: others become text, whole numbers of more than 64 bits too, NaN and infinities
    null."""
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, int) and value.bit_length() > 63:
        return str(value)
    return value if value is None or isinstance(value, (str, int, float)) else str(value)
