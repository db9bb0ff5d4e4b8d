"""Which shards the tokenizer stage reads: enough of them, chosen by their hashes; never the whole of a large corpus."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

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


def heldout_beginnings(records: Sequence[Record], most_bytes: float) -> list[tuple[Record, int | None]]:
    """The held-out shards to check, and of how many bytes from the beginning on: None is all of it.

    Of a source with at most `most_bytes` of text everything; else so much, from beginnings of shards chosen by hash.
    """
    limits: dict[str, int | None] = {}
    for own in by_source(records).values():
        some = own if _size(own) <= most_bytes else by_hash(own)[:MOST_LOOKED_AT]
        limits |= dict.fromkeys([record["path"] for record in some],
                                None if some is own else int(most_bytes) // len(some))
    return [(record, limits[record["path"]]) for record in records if record["path"] in limits]


def looked_at(records: Sequence[Record], most_bytes: int) -> list[tuple[Record, int]]:
    """The training shards whose beginnings are looked at, `most_bytes` in all, and how many bytes of each."""
    chosen = records if len(records) <= MOST_LOOKED_AT else by_hash(records)[:MOST_LOOKED_AT]
    return [(record, most_bytes // max(1, len(chosen))) for record in chosen]


def _size(records: Sequence[Record]) -> int:
    return sum(record["text_bytes"] for record in records)


def by_source(records: Iterable[Record]) -> dict[str, list[Record]]:
    """The shards of each source."""
    found: dict[str, list[Record]] = {}
    for record in records:
        found.setdefault(record["source"], []).append(record)
    return found
