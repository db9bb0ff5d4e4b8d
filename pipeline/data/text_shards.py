"""Text shards: WebDataset tars with one `.json` member a document. Written here, read by the stages that follow."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

from pipeline.contract.input_check import committed, refuse_changed
from pipeline.contract.manifest import Manifest
from pipeline.data.documents import Document, from_json, key_fits
from pipeline.errors import UserError
from pipeline.files import atomic_file

SUFFIX = ".json"
_BLOCK = tarfile.BLOCKSIZE
_MEND = "Delete the file and run the stage shard again: it makes only what is missing."


def shard_records(manifest: Manifest, split: str, source: str | None = None) -> list[dict[str, Any]]:
    """The output records (path, bytes, sha256, split, source, docs, text_bytes) of one split of the shard stage."""
    return [record for record in manifest.outputs
            if record.get("split") == split and source in (None, record["source"])]


def write_members(path: Path, members: Iterable[tuple[str, bytes]]) -> None:
    """Write (key, JSON) pairs as a tar that appears whole or not at all; equal members give equal bytes.

    The bytes are those of webdataset's own TarWriter, whose import would bring torch into every worker.
    """
    with atomic_file(path) as file, tarfile.open(fileobj=file, mode="w|") as tar:
        for key, member in members:
            entry = tarfile.TarInfo(key + SUFFIX)  # time, user and group are 0 and empty from the start
            entry.size = len(member)
            tar.addfile(entry, io.BytesIO(member))


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
    if count != (record["docs"] if only is None else len(only)):
        raise UserError(f"{path} holds {count} documents instead of {record['docs']}. {_MEND}")


def read_documents(path: Path, only: Collection[int] | None = None) -> Iterator[Document]:
    """The documents of one shard, in order, one in memory at a time; with `only`, those of these numbers, from 0.

    Raises:
        UserError: naming the file and the place at which it is torn or not a text shard.
    """
    place, end, number = "its beginning", 0, -1
    try:
        with tarfile.open(path, "r:") as tar:
            while (member := tar.next()) is not None:
                # tarfile would keep every member that it has met.
                tar.members.clear()  # type: ignore[attr-defined]
                place, end = f"the member {member.name}", member.offset_data + -(-member.size // _BLOCK) * _BLOCK
                number += 1
                if only is None or number in only:
                    yield _document(tar, member)
        place = f"byte {end}"
        _check_end(path, end)
    except FileNotFoundError:
        raise UserError(f"{path} is missing. Run the stage shard again: it makes only what is missing.") from None
    except (tarfile.TarError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} is torn or no text shard, at {place}: {error or type(error).__name__}. "
                        f"{_MEND}") from None


def _document(tar: tarfile.TarFile, member: tarfile.TarInfo) -> Document:
    file = tar.extractfile(member)
    if file is None or not member.name.endswith(SUFFIX):
        raise ValueError(f"it is not a {SUFFIX} file")
    data = file.read()
    if len(data) != member.size:
        raise ValueError(f"{len(data)} of {member.size} bytes are there")
    try:
        return from_json(data, member.name[:-len(SUFFIX)])
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error}") from None


def _check_end(path: Path, end: int) -> None:
    """A tar that was cut between two members reads without an error: only its end mark is missing."""
    with open(path, "rb") as file:
        file.seek(end)
        if file.read(2 * _BLOCK) != bytes(2 * _BLOCK):
            raise ValueError("the mark that ends a tar is missing, so members may be")
