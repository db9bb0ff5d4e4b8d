"""Which shards the tokenizer stage reads: a sufficient number, chosen by hash, never all of a large corpus."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np

from drover.pipeline.core.files import Record
from drover.pipeline.data.documents import Document
from drover.pipeline.data.text_shards import read_shard

COVER = 4
"""Training text is sampled from shards with this many times as much text, so that the sample spreads over documents."""
MOST_LOOKED_AT = 256
"""Most shards of a source of which the beginnings are read, if not all are read."""


def by_hash(records: Iterable[Record]) -> list[Record]:
    """The shards in an order that depends only on their contents."""
    return sorted(records, key=lambda record: (
        hashlib.sha256(f"0/{record['sha256']}".encode()).digest(), record["path"]))


def training_shards(records: Sequence[Record], train_bytes: float) -> tuple[list[Record], dict[str, float]]:
    """The shards from which `train_bytes` of training text are sampled, in the order of `records`, and by source the
    share of their text to take.

    All shards if the corpus is at most COVER times as large. Otherwise each source gets at least one shard, and as many
    as hold COVER times its proportion of the sample. So the amount that is read does not grow with the corpus.
    """
    total = max(1, _size(records))
    chosen, shares = set[str](), {}
    for source, own in by_source(records).items():
        share, some = train_bytes / total, own
        if total > COVER * train_bytes:
            order, wanted = by_hash(own), train_bytes * _size(own) / total
            covered = np.cumsum([record["text_bytes"] for record in order])
            some = order[:int(np.searchsorted(covered, COVER * wanted)) + 1]
            share = wanted / max(1, _size(some))
        chosen.update(record["path"] for record in some)
        shares[source] = share
    return [record for record in records if record["path"] in chosen], shares


def beginnings(records: Sequence[Record], most_bytes: float) -> list[tuple[Record, int | None]]:
    """Shards to check, each with the bytes of text to read from its beginning; None for all.

    All shards if they have at most `most_bytes` of text; otherwise that much, from shards chosen by hash.
    """
    if _size(records) <= most_bytes:
        return [(record, None) for record in records]
    chosen = by_hash(records)[:MOST_LOOKED_AT]
    return [(record, int(most_bytes) // len(chosen)) for record in chosen]


def beginnings_by_source(records: Sequence[Record], most_bytes: float) -> list[tuple[Record, int | None]]:
    """The `beginnings` of each source, with `most_bytes` for each."""
    return [result for own in by_source(records).values() for result in beginnings(own, most_bytes)]


def documents_of(folder: Path, record: Record, limit: int | None) -> Iterator[Document]:
    """The documents of a text shard; with `limit` those that begin in its first `limit` bytes of text."""
    size = 0
    for document in read_shard(folder, record):
        yield document
        size += len(document.text.encode())
        if limit is not None and size >= limit:
            break


def _size(records: Sequence[Record]) -> int:
    return sum(record["text_bytes"] for record in records)


def by_source(records: Iterable[Record]) -> dict[str, list[Record]]:
    """The shards of each source."""
    result: dict[str, list[Record]] = {}
    for record in records:
        result.setdefault(record["source"], []).append(record)
    return result
