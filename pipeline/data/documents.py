"""A document, what it becomes in a text shard, and the record of one that could not be read."""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import asdict, dataclass, field
from typing import Any

import orjson

DIGEST_BYTES = 16


@dataclass(frozen=True)
class Document:
    """One text of the corpus.

    Attributes:
        text: the text, never empty.
        source: name of the source it came from.
        id: its own id, or the file's name and the record's number.
        meta: fields kept beside the text; plain JSON values.
        key: its name in a shard, see `document_key`; empty before it is in one.
        place: where it was read, where its id does not say so: file and record as in such an id. No shard holds it.
    """

    text: str
    source: str
    id: str
    meta: dict[str, Any]
    key: str = ""
    place: str = field(default="", compare=False)


@dataclass(frozen=True)
class Rejection:
    """What could not be read: one line of `rejected.jsonl`.

    Attributes:
        source: name of the source.
        file: the input file, by its name within the source.
        record: 1-based line or record in the file; text: in a file that is read in parts, the offset of its first byte
            (in an Arrow file the batch and the row in it); None where the file as a whole is meant.
        reason: what is wrong with it.
        documents: how many documents are lost.
        lost: an unknown number of documents is lost beyond that: the file breaks off or cannot be opened.
    """

    source: str
    file: str
    record: int | str | None
    reason: str
    documents: int = 1
    lost: bool = False

    def line(self) -> bytes:
        """The rejection as a line of JSON; broken bytes in names show as escapes."""
        return (json.dumps(asdict(self)) + "\n").encode()

    def __str__(self) -> str:
        return f"{place_in(self.file, self.record)}: {self.reason}"


def place_in(file: str, record: int | str | None) -> str:
    """What a record of a file is called: `file:7` by number, `file@1234` by offset."""
    return file if record is None else f"{file}{'@' if isinstance(record, str) else ':'}{record}"


def digest(text: bytes) -> bytes:
    """What identifies a document's text: the first 16 bytes of its sha256."""
    return hashlib.sha256(text).digest()[:DIGEST_BYTES]


def document_key(text_digest: bytes, copy: int = 0) -> str:
    """A document's name in a shard: the digest in hex, without dots, and how many equal texts the shard has before."""
    return text_digest.hex() + (f"-{copy}" if copy else "")


def key_fits(document: Document) -> bool:
    """Whether the text is still the one that the key was made of."""
    return document.key.partition("-")[0] == digest(document.text.encode()).hex()


def to_json(document: Document) -> bytes:
    """The document as the `.json` member of a shard.

    Raises:
        UnicodeEncodeError: a text in it is not valid Unicode.
        TypeError, RecursionError: its meta holds something else than JSON's own types, or is nested too deeply.
    """
    value = {"text": document.text, "source": document.source, "id": document.id, "meta": document.meta}
    try:
        return orjson.dumps(value)
    except orjson.JSONEncodeError as error:
        json.dumps(value, ensure_ascii=False).encode()  # says where a text is not valid Unicode
        raise (RecursionError if "Recursion" in str(error) else TypeError)(str(error)) from None


def from_json(member: bytes, key: str) -> Document:
    """The document of a shard's `.json` member; ValueError, KeyError or TypeError if it is none."""
    value = orjson.loads(member)
    document = Document(value["text"], value["source"], value["id"], value["meta"], key)
    if not (isinstance(document.text, str) and isinstance(document.source, str)):
        raise TypeError("text and source must be strings")
    return document


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
