"""The texts of a whole shard in batches, for stages that take every one of them: one pass over the file, which is
hashed as it goes by.

What a text shard holds is what its hash says, so texts are not compared with their keys one by one here; where only
some documents are read, `pipeline.data.text_shards.read_shard` does that.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import orjson

from pipeline.contract.input_check import committed, wrong
from pipeline.data.documents import from_json
from pipeline.data.text_shards import BLOCK, END, MEND, NO_END, SUFFIX, open_shard, plain_header
from pipeline.errors import UserError

BUFFER_BYTES = 1 << 20


@dataclass
class Texts:
    """Some documents of a shard, in order: their texts, the UTF-8 bytes of each, their keys."""

    texts: list[str] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    keys: list[str] = field(default_factory=list)


def read_texts(folder: Path, record: dict[str, Any], batch_bytes: int) -> Iterator[Texts]:
    """The documents of a shard of which the manifest has `record`, in batches of about `batch_bytes` of text.

    Raises:
        UserError: the file is missing, is not what was committed (also after batches were given: nothing that was made
            of them may be kept then), or holds another number of documents.
    """
    path, count = folder / record["path"], 0
    with open_shard(path) as file:
        hashed, batch, size = _Hashed(file), Texts(), 0
        try:
            for name, member in _members(hashed):
                text = _text(member, name)
                encoded = len(text) if text.isascii() else len(text.encode())
                batch.texts.append(text)
                batch.lengths.append(encoded)
                batch.keys.append(name[:-len(SUFFIX)])
                size, count = size + encoded, count + 1
                if size >= batch_bytes:
                    yield batch
                    batch, size = Texts(), 0
        except (ValueError, KeyError, TypeError) as error:
            problem = f"{path} is torn or no text shard, at byte {hashed.at}: {error or type(error).__name__}. {MEND}"
            raise UserError(_changed(hashed, folder, record) or problem) from None
        if changed := _changed(hashed, folder, record):
            raise UserError(changed)
    if count != record["docs"]:
        raise UserError(f"{path} holds {count} documents instead of {record['docs']}. {MEND}")
    if batch.texts:
        yield batch


class _Hashed:
    """A file that is read from beginning to end and hashed meanwhile."""

    def __init__(self, file: IO[bytes]) -> None:
        self.file, self.digest, self.at = file, hashlib.sha256(), 0

    def read(self, count: int) -> bytes:
        data = self.file.read(count)
        self.digest.update(data)
        self.at += len(data)
        if len(data) < count:
            raise ValueError(f"{len(data)} of {count} bytes are there")
        return data

    def finish(self) -> str:
        """Hex sha256 of the whole file."""
        while data := self.file.read(BUFFER_BYTES):
            self.digest.update(data)
        return self.digest.hexdigest()


def _members(file: _Hashed) -> Iterator[tuple[str, bytes]]:
    """Name and content of each member of a tar such as `write_members` makes: plain files, no extended headers."""
    while (header := file.read(BLOCK)) != END[:BLOCK]:
        if (plain := plain_header(header)) is None:
            raise ValueError(f"the member {header[:100].rstrip(bytes(1))!r} is not a plain {SUFFIX} file")
        name, size = plain
        yield name, file.read(-(-size // BLOCK) * BLOCK)[:size]
    if file.read(BLOCK) != END[BLOCK:]:
        raise ValueError(NO_END)


def _text(member: bytes, name: str) -> str:
    try:
        text = orjson.loads(member)["text"]
    except orjson.JSONDecodeError:  # numbers beyond 64 bits in `meta`
        text = from_json(member, name).text
    if not isinstance(text, str):
        raise TypeError("text must be a string")
    return text


def _changed(hashed: _Hashed, folder: Path, record: dict[str, Any]) -> str:
    """What is told where the file is not the one that was committed, else ""."""
    [expected] = committed(folder, [record], "shard")
    found = hashed.finish()
    return "" if found == expected.sha256 else wrong(expected, found)
