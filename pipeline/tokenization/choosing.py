"""Which shards the tokenizer stage reads: enough of them, chosen by their hashes; never the whole of a large corpus."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from drover.pipeline.data.documents import Document
from drover.pipeline.data.text_shards import read_shard

Record = dict[str, Any]
COVER = 4
"""Training text is sampled from shards with so many times as much, so that the sample still spreads over documents."""
MOST_LOOKED_AT = 256
"""Shards of a source whose beginnings are looked at, where that is not all of them."""


def by_hash(records: Iterable[Record], seed: int = 0) -> list[Record]:
    """The shards in an order that only their contents and the seed decide."""
    return sorted(records, key=lambda record: (
        hashlib.sha256(f"{seed}/{record['sha256']}".encode()).digest(), record["path"]))


def training_shards(records: Sequence[Record], train_bytes: float, seed: int) -> tuple[list[Record], dict[str, float]]:
    """The shards to sample `train_bytes` of training text from, in the order of `records`, and by source the share of
    their text to take.

    All of them where the corpus is at most COVER times as large. Else of each source as many as hold COVER times what
    its share of the corpus makes it contribute, one at least; so what is read does not grow with the corpus.
    """
    total = max(1, _size(records))
    chosen, shares = set[str](), {}
    for source, own in by_source(records).items():
        share, some = train_bytes / total, own
        if total > COVER * train_bytes:
            order, wanted = by_hash(own, seed), train_bytes * _size(own) / total
            covered = np.cumsum([record["text_bytes"] for record in order])
            some = order[:int(np.searchsorted(covered, COVER * wanted)) + 1]
            share = wanted / max(1, _size(some))
        chosen.update(record["path"] for record in some)
        shares[source] = share
    return [record for record in records if record["path"] in chosen], shares


def beginnings(records: Sequence[Record], most_bytes: float) -> list[tuple[Record, int | None]]:
    """Shards to check, and of how many bytes of text from the beginning on: None is all of it.

    All of them where they have at most `most_bytes` of text; else so much, from shards chosen by hash.
    """
    if _size(records) <= most_bytes:
        return [(record, None) for record in records]
    chosen = by_hash(records)[:MOST_LOOKED_AT]
    return [(record, int(most_bytes) // len(chosen)) for record in chosen]


def beginnings_by_source(records: Sequence[Record], most_bytes: float) -> list[tuple[Record, int | None]]:
    """The `beginnings` of each source, with so much text of each."""
    return [found for own in by_source(records).values() for found in beginnings(own, most_bytes)]


def documents_of(folder: Path, record: Record, limit: int | None) -> Iterator[Document]:
    """The documents of a text shard; with `limit` those that begin in its first so many bytes of text."""
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
    found: dict[str, list[Record]] = {}
    for record in records:
        found.setdefault(record["source"], []).append(record)
    return found
