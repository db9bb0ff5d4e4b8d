"""Text shards: WebDataset tars with one `.json` member a document. webdataset writes and reads them.

It reads a truncated tar as a shorter one. So readers compare the number of documents, and the file's hash or each
document's key. Its import takes two seconds, because it brings torch, so it is imported where it is used.
"""

from __future__ import annotations

import gc
import hashlib
import tarfile
from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import IO, TYPE_CHECKING, NamedTuple, TypedDict, cast

import orjson

from drover.pipeline.contract.inputs import output, refuse_changed
from drover.pipeline.contract.manifest import check_record
from drover.pipeline.core.errors import UserError
from drover.pipeline.core.files import Count, atomic_file, opened
from drover.pipeline.data.documents import Document, from_json, key_fits

if TYPE_CHECKING:
    from webdataset import TarWriter

    from drover.pipeline.contract.manifest import Manifest

SUFFIX = ".json"
SPLITS = ("train", "validation")
MOST_LOOKED_AT = 256
"""Most shards of a source of which the beginnings are read, if not all are read."""
_BUFFER = 1 << 20
_WRONG = (ValueError, KeyError, TypeError, AttributeError)
"""What is raised of a file that is no text shard."""
_FIX = "Run the stage shard again (delete the file first if it is there): it makes only what is missing."


class TextRecord(TypedDict):
    """A text shard's output record."""

    path: str
    bytes: Count
    sha256: str
    split: str
    source: str
    docs: Count
    text_bytes: Count


def shard_records(manifest: Manifest, split: str, source: str | None = None) -> list[TextRecord]:
    """The output records of one split (and source) of the shard stage."""
    records = [record for record in manifest.outputs if record.get("split") == split]
    for record in records:
        check_record(record, TextRecord, "shard")
    return [cast("TextRecord", record) for record in records if source in (None, record["source"])]


def shard_name(record: TextRecord) -> str:
    """The split and name of a shard, by its record: its path without the ending."""
    return Path(record["path"]).with_suffix("").as_posix()


def write_members(path: Path, members: Iterable[tuple[str, bytes]]) -> None:
    """Write (key, JSON) pairs as a tar that appears whole or not at all; equal members give equal bytes."""
    with (atomic_file(path, keep_equal=True) as file,
          _tar_writer()(file, user="", group="", mode=0o644, mtime=0, compress=False, encoder=False) as tar):
        for key, member in members:
            tar.write({"__key__": key, "json": member})


@cache
def _tar_writer() -> type[TarWriter]:
    """webdataset's writer, imported once. What its import makes lives as long as the process, so the garbage collector
    need not look through it while members are written: that took a third of the time."""
    from webdataset import TarWriter

    gc.freeze()
    return TarWriter


def refuse_changed_shard(folder: Path, record: TextRecord) -> None:
    """UserError if the shard of which the manifest has `record` is there and is not what was committed."""
    refuse_changed(output(folder, record, "shard"))


def read_shard(folder: Path, record: TextRecord, only: Collection[int] | None = None) -> Iterator[Document]:
    """The documents of a shard of which the manifest has `record`, in order.

    only: numbers of documents, from 0; the others are passed over.

    Raises:
        UserError: the shard is truncated, a text was changed, or the number of documents is wrong.
    """
    path = folder / record["path"]
    count = 0
    with _open(path) as file:
        for count, (key, member) in enumerate(_members(file, path), 1):
            if only is not None and count - 1 not in only:
                continue
            try:
                document = from_json(member, key)
            except _WRONG as error:
                raise UserError(f"{path} is no text shard, at the member {key}{SUFFIX}: {error}. {_FIX}") from None
            if not key_fits(document):
                raise UserError(f"{path} is damaged: the text of the document {document.id} does not have the hash "
                                f"that its name {document.key} says. {_FIX}")
            yield document
    if count != record["docs"]:
        raise UserError(f"{path} holds {count} documents instead of {record['docs']}. {_FIX}")


def _members(file: IO[bytes], path: Path) -> Iterator[tuple[str, bytes]]:
    """The key and content of each member, as webdataset reads them."""
    from webdataset.tariterators import tar_file_iterator

    place = "its beginning"
    try:
        for member in tar_file_iterator(file):
            place = f"the member {member['fname']}"
            yield member["fname"].removesuffix(SUFFIX), member["data"]
    except (tarfile.TarError, EOFError, ValueError) as error:
        raise UserError(f"{path} is truncated or no text shard, after {place}: {error}. {_FIX}") from None


class Texts(NamedTuple):
    """Some documents of a shard, in order: their texts, the UTF-8 bytes of each, their keys."""

    texts: list[str]
    lengths: list[int]
    keys: list[str]


def read_texts(folder: Path, record: TextRecord, batch_bytes: int) -> Iterator[Texts]:
    """The documents of a shard of which the manifest has `record`, in batches of about `batch_bytes` of text. The file
    is hashed first, so texts are not compared with their keys.

    Raises:
        UserError: the file is missing, or is not what was committed.
    """
    refuse_changed_shard(folder, record)
    path = folder / record["path"]
    size = 0
    batch = Texts([], [], [])
    with _open(path) as file:
        for key, member in _members(file, path):
            text = orjson.loads(member)["text"]
            encoded = len(text) if text.isascii() else len(text.encode())
            batch.texts.append(text)
            batch.lengths.append(encoded)
            batch.keys.append(key)
            size += encoded
            if size >= batch_bytes:
                yield batch
                batch, size = Texts([], [], []), 0
    if batch.texts:
        yield batch


def _open(path: Path) -> IO[bytes]:
    try:
        return opened(path, _BUFFER)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}. {_FIX}") from None


def by_hash(records: Iterable[TextRecord]) -> list[TextRecord]:
    """The shards in an order that depends only on their contents."""
    return sorted(records, key=lambda record: (
        hashlib.sha256(f"0/{record['sha256']}".encode()).digest(), record["path"]))


def by_source(records: Iterable[TextRecord]) -> dict[str, list[TextRecord]]:
    """The shards of each source."""
    result: dict[str, list[TextRecord]] = {}
    for record in records:
        result.setdefault(record["source"], []).append(record)
    return result


def text_bytes(records: Sequence[TextRecord]) -> int:
    """The bytes of text in shards."""
    return sum(record["text_bytes"] for record in records)


def beginnings(records: Sequence[TextRecord], most_bytes: float) -> list[tuple[TextRecord, int | None]]:
    """Shards to check, each with the bytes of text to read from its beginning; None for all.

    All shards if they have at most `most_bytes` of text; otherwise that much, from shards chosen by hash.
    """
    if text_bytes(records) <= most_bytes:
        return [(record, None) for record in records]
    chosen = by_hash(records)[:MOST_LOOKED_AT]
    return [(record, int(most_bytes) // len(chosen)) for record in chosen]


def beginnings_by_source(records: Sequence[TextRecord], most_bytes: float) -> list[tuple[TextRecord, int | None]]:
    """The `beginnings` of each source, with `most_bytes` for each."""
    return [result for own in by_source(records).values() for result in beginnings(own, most_bytes)]


def documents_of(folder: Path, record: TextRecord, limit: int | None) -> Iterator[Document]:
    """The documents of a text shard; with `limit` those that begin in its first `limit` bytes of text."""
    size = 0
    for document in read_shard(folder, record):
        yield document
        size += len(document.text.encode())
        if limit is not None and size >= limit:
            break
