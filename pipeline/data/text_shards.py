"""Text shards: WebDataset tars with one `.json` member a document. Written here, read by the stages that follow.

Where a whole shard is read for its texts, webdataset reads it, and the file's hash proves what was read. Elsewhere, and
where documents are picked or a shard is proved as it was written, only tars of the form that is written here are read:
plain members without extended headers. webdataset's import takes a second, as it brings torch.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import tarfile
from collections.abc import Collection, Iterable, Iterator
from io import BufferedReader
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NamedTuple, TypedDict

import orjson

from drover.pipeline.contract.input_check import output, refuse_changed, refuse_longer, wrong
from drover.pipeline.contract.manifest import check_record
from drover.pipeline.core.errors import UserError
from drover.pipeline.core.files import Count, atomic_file, opened
from drover.pipeline.data.documents import Document, from_json, key_fits
from drover.pipeline.data.streams import Watched

if TYPE_CHECKING:
    from drover.pipeline.contract.manifest import Manifest

SUFFIX = ".json"
SPLITS = ("train", "validation")
BLOCK = tarfile.BLOCKSIZE
END = bytes(2 * BLOCK)
"""Ends a tar."""
_NAME = tarfile.LENGTH_NAME
_BUFFER = 1 << 20
_EMPTY = tarfile.TarInfo().tobuf()
"""The header of a member without a name and content. Name, size (octal, at 124) and sum of all bytes (at 148, itself
counted as spaces) are what differs in others."""
_EMPTY_SUM = sum(_EMPTY) - sum(_EMPTY[148:156]) + 8 * ord(" ") - sum(_EMPTY[124:135])
_WRONG = (ValueError, KeyError, TypeError, AttributeError)
"""What is raised of a file that is no text shard."""
_FIX = "Delete the file and run the stage shard again: it makes only what is missing."


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


def shard_name(record: dict[str, Any]) -> str:
    """The split and name of a shard, by its record: its path without the ending."""
    return Path(record["path"]).with_suffix("").as_posix()


def write_members(path: Path, members: Iterable[tuple[str, bytes]]) -> None:
    """Write (key, JSON) pairs as a tar that appears whole or not at all; equal members give equal bytes.

    The bytes are those of webdataset's own TarWriter, whose import would bring torch into every worker.
    """
    with atomic_file(path) as file:
        written = 0
        for key, member in members:
            written += file.write(b"".join((_header(key + SUFFIX, len(member)), member, bytes(-len(member) % BLOCK))))
        written += file.write(END)
        file.write(bytes(-written % tarfile.RECORDSIZE))


def _header(name: str, size: int) -> bytes:
    """A member's header as tarfile writes it; time, user and group are 0 and empty."""
    data, digits = name.encode("ascii"), b"%011o" % size
    if len(data) > _NAME or len(digits) > 11:
        raise ValueError(f"the member {name} of {size:,} bytes does not fit a plain header")
    total = _EMPTY_SUM + sum(data) + sum(digits)
    return b"".join((data, bytes(_NAME - len(data)), _EMPTY[_NAME:124], digits, _EMPTY[135:148], b"%06o\0" % total,
                     _EMPTY[155:]))


def _parsed_header(header: bytes) -> tuple[str, int]:
    """Name and size of a member; ValueError unless `write_members` makes this header for them."""
    name, digits = header[:_NAME].rstrip(b"\0"), header[124:135]
    if name.isascii() and name.endswith(SUFFIX.encode()) and digits.isdigit():
        size = int(digits, 8)
        if header == _header(name.decode(), size):
            return name.decode(), size
    raise ValueError(f"the member {name!r} is not a plain {SUFFIX} file")


def refuse_changed_shard(folder: Path, record: dict[str, Any]) -> None:
    """UserError if the shard of which the manifest has `record` is there and is not what was committed."""
    refuse_changed(output(folder, record, "shard"))


def read_shard(folder: Path, record: dict[str, Any], only: Collection[int] | None = None) -> Iterator[Document]:
    """The documents of a shard of which the manifest has `record`, in order.

    only: numbers of documents, from 0; the others are passed over, and their number is not checked.

    Raises:
        UserError: the shard is truncated, a text was changed, or the number of documents is wrong.
    """
    path, count = folder / record["path"], 0
    for document in read_documents(path, only):
        if not key_fits(document):
            raise UserError(f"{path} is damaged: the text of the document {document.id} does not have the hash that "
                            f"its name {document.key} says. {_FIX}")
        count += 1
        yield document
    _refuse_other_count(path, count, record["docs"] if only is None else len(only))


def read_documents(path: Path, only: Collection[int] | None = None) -> Iterator[Document]:
    """The documents of one shard, in order, one in memory at a time; with `only`, those of these numbers, from 0.

    Raises:
        UserError: naming the file and the place at which it is truncated or not a text shard.
    """
    place = "its beginning"
    with _open(path) as file:
        size = os.fstat(file.fileno()).st_size

        def passed(count: int) -> int:
            """A number of bytes that are there."""
            if count > size - file.tell():
                raise ValueError(f"{size - file.tell()} of {count} bytes are there, and the mark that ends a tar is "
                                 f"missing")
            return count
        try:
            for number in itertools.count():
                if (header := file.read(passed(BLOCK))) == END[:BLOCK]:
                    break
                name, length = _parsed_header(header)
                place = f"the member {name}"
                padded = passed(-(-length // BLOCK) * BLOCK)
                if only is None or number in only:
                    yield from_json(file.read(padded)[:length], name[:-len(SUFFIX)])
                else:
                    file.seek(padded, os.SEEK_CUR)
            if file.read(passed(BLOCK)) != END[BLOCK:]:
                raise ValueError("the mark that ends a tar is missing, so members may be")
        except _WRONG as error:
            raise UserError(f"{path} is truncated or no text shard, at {place}: {error}. {_FIX}") from None


class Texts(NamedTuple):
    """Some documents of a shard, in order: their texts, the UTF-8 bytes of each, their keys."""

    texts: list[str]
    lengths: list[int]
    keys: list[str]


def read_texts(folder: Path, record: dict[str, Any], batch_bytes: int) -> Iterator[Texts]:
    """The documents of a shard of which the manifest has `record`, in batches of about `batch_bytes` of text. The file
    is hashed while it is read, so texts are not compared with their keys.

    Raises:
        UserError: the file is missing, is not what was committed (also after batches were given: nothing that was made
            of them may be kept then), or holds another number of documents.
    """
    from webdataset.tariterators import tar_file_iterator  # it reads a truncated or foreign tar as a shorter one

    expected, count, fault = output(folder, record, "shard"), 0, None
    path = expected.path
    batch, size = Texts([], [], []), 0
    digest = hashlib.sha256()
    with _open(path) as file, BufferedReader(Watched(file, 0, lambda at, data: digest.update(data)), _BUFFER) as hashed:
        refuse_longer(expected)
        try:
            for member in tar_file_iterator(hashed):
                text = orjson.loads(member["data"])["text"]
                encoded = len(text) if text.isascii() else len(text.encode())
                batch.texts.append(text)
                batch.lengths.append(encoded)
                batch.keys.append(member["fname"][:-len(SUFFIX)])
                size, count = size + encoded, count + 1
                if size >= batch_bytes:
                    yield batch
                    batch, size = Texts([], [], []), 0
        except Exception as error:  # noqa: BLE001 - whatever comes of other bytes: that they are others says more
            fault = error
        while hashed.read(_BUFFER):
            pass
    if (found := digest.hexdigest()) != expected.sha256:
        raise UserError(wrong(expected, found)) from fault
    if fault is not None:
        raise UserError(f"{path} is no text shard: {fault}. {_FIX}") from fault
    _refuse_other_count(path, count, record["docs"])
    if batch.texts:
        yield batch


def _refuse_other_count(path: Path, count: int, wanted: int) -> None:
    if count != wanted:
        raise UserError(f"{path} holds {count} documents instead of {wanted}. {_FIX}")


def _open(path: Path) -> IO[bytes]:
    try:
        return opened(path, _BUFFER)
    except FileNotFoundError:
        raise UserError(f"{path} is missing. Run the stage shard again: it makes only what is missing.") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}. {_FIX}") from None
