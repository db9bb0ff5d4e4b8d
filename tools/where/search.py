"""Search documents by text, by id or by key, in worker processes.

A process gets one or more shards and returns numbers and names. Of the text, only excerpts are returned.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Set
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from drover.pipeline.contract.manifest import Manifest
from drover.pipeline.core.console import first
from drover.pipeline.core.errors import UserError
from drover.pipeline.core.files import Record, read_lines
from drover.pipeline.data.documents import digest, document_key, place_in
from drover.pipeline.data.shard_table import ShardTable
from drover.pipeline.data.text_shards import SPLITS, read_shard
from drover.pipeline.data.token_shards import KEY_BYTES, TokenShard
from drover.tools.processes import in_order

KEYS_AT_ONCE = 1 << 20
SHARDS_AT_ONCE = 32
"""Token shards whose keys a process searches at a time."""
AROUND = 60
"""Characters of an excerpt before and after the match."""
DROPPED = "dropped"
"""The split, in the stage's manifest, of files with the documents that filters dropped."""


Ids = frozenset[tuple[str, str]]
"""Ids of documents, each as (source, id); source "" means any."""


@dataclass(frozen=True)
class Wanted:
    """A search: one of text, ids and key.

    Attributes:
        text: a part of a document's text.
        ignore_case: whether to ignore the case of the text.
        ids: of documents.
        key: first hexadecimal digits of a key.
    """

    text: str = ""
    ignore_case: bool = False
    ids: Ids = frozenset()
    key: str = ""

    def place(self, source: str, names: tuple[str, ...], text: str) -> int | None:
        """Where the match begins in a document's text; None if the document does not match.

        names: the document's id, and its file and record if it has an id of its own.
        """
        if self.ids:
            return 0 if any(named(self.ids, source, name) for name in names) else None
        if self.key:
            return 0 if document_key(digest(text.encode())).startswith(self.key) else None
        if self.ignore_case:
            match = re.search(re.escape(self.text), text, re.IGNORECASE)
            return match.start() if match else None
        found = text.find(self.text)
        return None if found < 0 else found


def named(ids: Set[tuple[str, str]], source: str, name: str) -> bool:
    """Whether a document of this source and id is among (source, id) pairs, in which source "" means any."""
    return not ids.isdisjoint({(source, name), ("", name)})


@dataclass(frozen=True)
class Hit:
    """A document that was found.

    shard: the text shard's path inside its stage's folder; number: of the document in it, from 0.
    dropped: the filter that dropped it, and the reason; None for a document of a shard.
    place: its file and record, if it has an id of its own.
    """

    shard: str
    number: int
    source: str
    id: str
    excerpt: str = ""
    dropped: tuple[str, str] | None = None
    place: str = ""


def text_hits(folder: Path, manifest: Manifest, wanted: Wanted, source: str | None, processes: int, limit: int,
              splits: tuple[str, ...] = (*SPLITS, DROPPED)) -> tuple[list[Hit], bool]:
    """The matching documents of the shard stage in `folder`, in the order of its shards: at most `limit`, and whether
    there are more.

    Raises:
        UserError: a shard is missing or damaged.
    """
    jobs = ((folder, record, wanted, limit)
            for split in splits for record in manifest.outputs
            if record.get("split") == split and source in (None, record["source"]))
    found: list[Hit] = []
    with closing(in_order(_hits_in, jobs, processes)) as parts:
        for part in parts:
            found += part
            if len(found) > limit:
                return found[:limit], True
    return found, False


def _hits_in(job: tuple[Path, Record, Wanted, int]) -> list[Hit]:
    """The matches in a file: at most one more than the limit."""
    folder, record, wanted, limit = job
    found: list[Hit] = []
    for hit, text in _texts(folder, record):
        if (at := wanted.place(hit.source, (hit.id, hit.place) if hit.place else (hit.id,), text)) is not None:
            excerpt = text[max(0, at - AROUND):at + len(wanted.text) + AROUND] if wanted.text else ""
            found.append(replace(hit, excerpt=excerpt))
            if len(found) > limit:
                break
    return found


def _texts(folder: Path, record: Record) -> Iterator[tuple[Hit, str]]:
    """Each document of a file, and its text."""
    path = folder / record["path"]
    if record["split"] != DROPPED:
        for number, document in enumerate(read_shard(folder, record)):
            yield Hit(record["path"], number, document.source, document.id, place=document.place), document.text
        return
    if not path.is_file():
        raise UserError(f"{path} is missing. Run the stage shard again: it makes only what is missing.")
    for number, line in enumerate(read_lines(path)):
        yield Hit(record["path"], number, line["source"], line["id"], dropped=(line["filter"], line["reason"]),
                  place=line.get("place", "")), line["text"]


def key_hits(folder: Path, table: ShardTable, key: str, source: str | None, processes: int) -> list[tuple[int, int]]:
    """(row of the table, number in the shard) of each document whose key begins with `key`, in the order of the table.

    Raises:
        UserError: several different keys begin with it.
    """
    jobs = [(folder, row, table.record(row), key) for row in range(len(table))
            if source in (None, table.kinds[table.kind[row]][1])]
    found: list[tuple[int, int]] = []
    keys: dict[str, None] = {}
    for part in in_order(_keys_in, jobs, processes, SHARDS_AT_ONCE):
        for row, number, whole in part:
            found.append((row, number))
            keys[whole] = None
    if len(keys) > 1:
        raise UserError(f"{len(keys):,} documents have keys that begin with {key}: {first([*keys], 4)}. "
                        f"Give more digits.")
    return found


def _keys_in(job: tuple[Path, int, Record, str]) -> list[tuple[int, int, str]]:
    """The row, number and key of each document of a shard whose key begins with the prefix."""
    folder, row, record, prefix = job
    shard, found = TokenShard(folder / record["path"], record), []
    low, high = (np.bytes_(bytes.fromhex(prefix.ljust(2 * KEY_BYTES, end))) for end in "0f")
    for start in range(0, shard.documents, KEYS_AT_ONCE):
        keys = shard.keys(start, min(start + KEYS_AT_ONCE, shard.documents)).view(f"S{KEY_BYTES}").reshape(-1)
        found += [(row, start + int(number), keys[number].ljust(KEY_BYTES, b"\0").hex())
                  for number in np.flatnonzero((keys >= low) & (keys <= high))]
    return found


def rejections(folder: Path, ids: Ids) -> Iterator[Record]:
    """The lines of rejected.jsonl whose records have one of these ids."""
    for line in read_lines(folder / "rejected.jsonl"):
        if named(ids, line["source"], place_in(line["file"], line["record"])):
            yield line
