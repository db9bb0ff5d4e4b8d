"""Text shards: WebDataset tars with one `.json` member a document. Written here, read by the stages that follow."""

from __future__ import annotations

import io
import json
import os
import tarfile
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TypedDict

from pipeline.contract.input_check import committed, refuse_changed
from pipeline.contract.manifest import check_record
from pipeline.data.documents import Document, from_json, key_fits
from pipeline.errors import UserError
from pipeline.files import Count, atomic_file

if TYPE_CHECKING:
    from pipeline.contract.manifest import Manifest

SUFFIX = ".json"
SPLITS = ("train", "heldout")
BLOCK = tarfile.BLOCKSIZE
END = bytes(2 * BLOCK)
"""Ends a tar."""
_NAME = tarfile.LENGTH_NAME
_TOGETHER = 1 << 20
"""Bytes written or read at once."""
_EMPTY = tarfile.TarInfo().tobuf()
"""The header of a member without a name and content. Name, size (octal, at 124) and sum of all bytes (at 148, itself
counted as spaces) are what differs in others."""
_EMPTY_SUM = sum(_EMPTY) - sum(_EMPTY[148:156]) + 8 * ord(" ") - sum(_EMPTY[124:135])
NO_END = "the mark that ends a tar is missing, so members may be"
MEND = "Delete the file and run the stage shard again: it makes only what is missing."


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


def write_members(path: Path, members: Iterable[tuple[str, bytes]]) -> None:
    """Write (key, JSON) pairs as a tar that appears whole or not at all; equal members give equal bytes.

    The bytes are those of webdataset's own TarWriter, whose import would bring torch into every worker.
    """
    with atomic_file(path) as file:
        written, held, waiting = 0, 0, list[bytes]()
        for key, member in members:
            header, size = _header(key + SUFFIX, len(member)), len(member)
            waiting += (header, member, bytes(-size % BLOCK))
            held += len(header) + size + -size % BLOCK
            if held >= _TOGETHER:
                written += file.write(b"".join(waiting))
                held = 0
                waiting.clear()
        written += file.write(b"".join(waiting) + END)
        file.write(bytes(-written % tarfile.RECORDSIZE))


def _header(name: str, size: int) -> bytes:
    """A member's header as tarfile writes it; time, user and group are 0 and empty."""
    data = name.encode("ascii", "replace")
    if len(data) > _NAME or not name.isascii() or size >= 8**11:
        entry = tarfile.TarInfo(name)
        entry.size = size
        return entry.tobuf()
    digits = b"%011o" % size
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
                            f"its name {document.key} says. {MEND}")
        count += 1
        yield document
    if count != (record["docs"] if only is None else len(only)):
        raise UserError(f"{path} holds {count} documents instead of {record['docs']}. {MEND}")


def read_documents(path: Path, only: Collection[int] | None = None) -> Iterator[Document]:
    """The documents of one shard, in order, one in memory at a time; with `only`, those of these numbers, from 0.

    Raises:
        UserError: naming the file and the place at which it is torn or not a text shard.
    """
    place, end, number, start = "its beginning", 0, -1, 0
    try:
        with open_shard(path) as file:
            while (plain := _plain_member(file, end, read=only is None or number + 1 in only)) is not None:
                (name, size, data), start = plain, end
                place, end = f"the member {name}", start + BLOCK + -(-size // BLOCK) * BLOCK
                number += 1
                if data is not None:
                    yield _parsed(data, name)
            # What is not as it is written here is left to tarfile, from the last good member on.
            file.seek(start)
            with tarfile.open(fileobj=file, mode="r:") as tar:
                while (member := tar.next()) is not None:
                    # tarfile would keep every member that it has met.
                    tar.members.clear()  # type: ignore[attr-defined]
                    if member.offset < end:
                        continue
                    place, end = f"the member {member.name}", member.offset_data + -(-member.size // BLOCK) * BLOCK
                    number += 1
                    if only is None or number in only:
                        yield _document(tar, member)
        place = f"byte {end}"
        _check_end(path, end)
    except (tarfile.TarError, ValueError, KeyError, TypeError, OverflowError) as error:
        raise UserError(f"{path} is torn or no text shard, at {place}: {error or type(error).__name__}. "
                        f"{MEND}") from None


class ShardFile(io.BufferedReader):
    """A shard that is open. Whatever size a header tells of, no more is asked for than the file has."""

    def read(self, size: int | None = -1) -> bytes:
        left = max(0, os.fstat(self.fileno()).st_size - self.tell())
        return super().read(left if size is None or size < 0 else min(size, left))


def open_shard(path: Path) -> ShardFile:
    """The file of a shard; UserError if it cannot be read."""
    try:
        return ShardFile(open(path, "rb", buffering=0), _TOGETHER)
    except FileNotFoundError:
        raise UserError(f"{path} is missing. Run the stage shard again: it makes only what is missing.") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}. {MEND}") from None


def _plain_member(file: IO[bytes], start: int, *, read: bool) -> tuple[str, int, bytes | None] | None:
    """Name, size and content (if it is to be read) of the member at `start`, if its header is a plain one; None if it
    is another or the file ends before the member does."""
    file.seek(start)
    if (plain := plain_header(file.read(BLOCK))) is None or not read:
        return plain and (*plain, None)
    name, size = plain
    data = file.read(size)
    return (name, size, data) if len(data) == size else None


def plain_header(header: bytes) -> tuple[str, int] | None:
    """Name and size of a member whose header is as `write_members` makes it, byte for byte; None if it is another."""
    name, digits = header[:_NAME].rstrip(b"\0"), header[124:135]
    if not (digits.isdigit() and name.isascii() and name.endswith(SUFFIX.encode())):
        return None
    try:
        size = int(digits, 8)
    except ValueError:
        return None
    return (name.decode("ascii"), size) if header == _header(name.decode("ascii"), size) else None


def _document(tar: tarfile.TarFile, member: tarfile.TarInfo) -> Document:
    file = tar.extractfile(member) if member.isreg() and not member.issparse() else None
    if file is None or not member.name.endswith(SUFFIX):
        raise ValueError(f"it is not a {SUFFIX} file")
    data = file.read()
    if len(data) != member.size:
        raise ValueError(f"{len(data)} of {member.size} bytes are there")
    return _parsed(data, member.name)


def _parsed(data: bytes, name: str) -> Document:
    try:
        return from_json(data, name[:-len(SUFFIX)])
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error}") from None


def _check_end(path: Path, end: int) -> None:
    """A tar that was cut between two members reads without an error: only its end mark is missing."""
    with open(path, "rb") as file:
        file.seek(end)
        if file.read(len(END)) != END:
            raise ValueError(NO_END)
