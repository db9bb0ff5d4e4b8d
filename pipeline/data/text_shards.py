"""Text shards: WebDataset tars with one `.json` member a document. Written here, read by the stages that follow.

Where a whole shard is read for its texts, webdataset reads it, and the file's hash proves what was read. Elsewhere
tarfile does, and each text is compared with its key: webdataset's import takes a second, as it brings torch.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import tarfile
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TypedDict

import orjson

from drover.pipeline.contract.input_check import committed, refuse_changed
from drover.pipeline.contract.manifest import check_record
from drover.pipeline.core.errors import UserError
from drover.pipeline.core.files import Count, atomic_file
from drover.pipeline.data.documents import Document, from_json, key_fits

if TYPE_CHECKING:
    from drover.pipeline.contract.manifest import Manifest

SUFFIX = ".json"
SPLITS = ("train", "heldout")
BLOCK = tarfile.BLOCKSIZE
END = bytes(2 * BLOCK)
"""Ends a tar."""
_NAME = tarfile.LENGTH_NAME
_BUFFER = 1 << 20
_EMPTY = tarfile.TarInfo().tobuf()
"""The header of a member without a name and content. Name, size (octal, at 124) and sum of all bytes (at 148, itself
counted as spaces) are what differs in others."""
_EMPTY_SUM = sum(_EMPTY) - sum(_EMPTY[148:156]) + 8 * ord(" ") - sum(_EMPTY[124:135])
_WRONG = (tarfile.TarError, ValueError, KeyError, TypeError, AttributeError, OverflowError)
"""What is raised of a file that is no text shard."""
_MEND = "Delete the file and run the stage shard again: it makes only what is missing."


class TextRecord(TypedDict):
    """What of a shard's output record is read by."""

    source: str
    docs: Count


def shard_records(manifest: Manifest, split: str, source: str | None = None) -> list[dict[str, Any]]:
    """The output records (path, bytes, sha256, split, source, docs, text_bytes) of one split of the shard stage."""
    records = [record for record in manifest.outputs if record.get("split") == split]
    for record in records:
        check_record(record, TextRecord, "shard")
    return [record for record in records if source in (None, record["source"])]


def write_members(path: Path, members: Iterable[tuple[str, bytes]]) -> str:
    """Write (key, JSON) pairs as a tar that appears whole or not at all; equal members give equal bytes.

    The bytes are those of webdataset's own TarWriter, whose import would bring torch into every worker.

    Returns:
        Hex sha256 of what was written.
    """
    with atomic_file(path) as file:
        written, digest = 0, hashlib.sha256()
        for key, member in members:
            data = b"".join((_header(key + SUFFIX, len(member)), member, bytes(-len(member) % BLOCK)))
            written += file.write(data)
            digest.update(data)
        rest = END + bytes(-(written + len(END)) % tarfile.RECORDSIZE)
        file.write(rest)
        digest.update(rest)
    return digest.hexdigest()


def _header(name: str, size: int) -> bytes:
    """A member's header as tarfile writes it, ten times as fast; time, user and group are 0 and empty."""
    data, digits = name.encode("ascii"), b"%011o" % size
    if len(data) > _NAME or len(digits) > 11:
        raise ValueError(f"the member {name} of {size:,} bytes does not fit a plain header")
    total = _EMPTY_SUM + sum(data) + sum(digits)
    return b"".join((data, bytes(_NAME - len(data)), _EMPTY[_NAME:124], digits, _EMPTY[135:148], b"%06o\0" % total,
                     _EMPTY[155:]))


def refuse_changed_shard(folder: Path, record: dict[str, Any]) -> None:
    """UserError if the shard of which the manifest has `record` is there and is not what was committed."""
    [expected] = committed(folder, [record], "shard")
    refuse_changed(expected)


def read_shard(folder: Path, record: dict[str, Any], only: Collection[int] | None = None) -> Iterator[Document]:
    """The documents of a shard of which the manifest has `record`, in order.

    only: numbers of documents, from 0; the others are passed over, and their number is not checked.

    Raises:
        UserError: the shard is torn, a text is not the one that was written, or their number is another.
    """
    path, count = folder / record["path"], 0
    for document in read_documents(path, only):
        if not key_fits(document):
            raise UserError(f"{path} is damaged: the text of the document {document.id} does not have the hash that "
                            f"its name {document.key} says. {_MEND}")
        count += 1
        yield document
    _refuse_other_count(path, count, record["docs"] if only is None else len(only))


def read_documents(path: Path, only: Collection[int] | None = None) -> Iterator[Document]:
    """The documents of one shard, in order, one in memory at a time; with `only`, those of these numbers, from 0. That
    members are missing, a tar does not always tell: compare their number.

    Raises:
        UserError: naming the file and the place at which it is torn or not a text shard.
    """
    place = "its beginning"
    with _open(path) as file:
        size = os.fstat(file.fileno()).st_size
        try:
            with tarfile.open(fileobj=file, mode="r:") as tar:
                for number in itertools.count():
                    if (member := tar.next()) is None:
                        break
                    place = f"the member {member.name}"
                    if member.offset_data + member.size > size:
                        raise ValueError("it is said to end behind the file")
                    tar.members.clear()  # type: ignore[attr-defined]
                    if only is None or number in only:
                        yield from_json(tar.extractfile(member).read(), member.name.removesuffix(SUFFIX))  # type: ignore[union-attr]
        except _WRONG as error:
            raise UserError(f"{path} is torn or no text shard, at {place}: {error}. {_MEND}") from None


@dataclass
class Texts:
    """Some documents of a shard, in order: their texts, the UTF-8 bytes of each, their keys."""

    texts: list[str] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    keys: list[str] = field(default_factory=list)


def read_texts(folder: Path, record: dict[str, Any], batch_bytes: int) -> Iterator[Texts]:
    """The documents of a shard of which the manifest has `record`, in batches of about `batch_bytes` of text. The file
    is compared with its hash before, so texts are not compared with their keys.

    Raises:
        UserError: the file is missing, is not what was committed, or holds another number of documents.
    """
    path, count, batch, size = folder / record["path"], 0, Texts(), 0
    with _open(path) as file:
        refuse_changed_shard(folder, record)
        try:
            for name, member in _members(file):
                text = orjson.loads(member)["text"]
                encoded = len(text) if text.isascii() else len(text.encode())
                batch.texts.append(text)
                batch.lengths.append(encoded)
                batch.keys.append(name[:-len(SUFFIX)])
                size, count = size + encoded, count + 1
                if size >= batch_bytes:
                    yield batch
                    batch, size = Texts(), 0
        except _WRONG as error:
            raise UserError(f"{path} is no text shard: {error}. {_MEND}") from None
    _refuse_other_count(path, count, record["docs"])
    if batch.texts:
        yield batch


def _members(file: IO[bytes]) -> Iterator[tuple[str, bytes]]:
    """Name and content of each member, by webdataset, which takes a torn or foreign tar for a shorter one."""
    from webdataset.tariterators import tar_file_iterator

    for member in tar_file_iterator(file):
        yield member["fname"], member["data"]


def _refuse_other_count(path: Path, count: int, wanted: int) -> None:
    if count != wanted:
        raise UserError(f"{path} holds {count} documents instead of {wanted}. {_MEND}")


def _open(path: Path) -> IO[bytes]:
    try:
        return open(path, "rb", buffering=_BUFFER)
    except FileNotFoundError:
        raise UserError(f"{path} is missing. Run the stage shard again: it makes only what is missing.") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}. {_MEND}") from None
