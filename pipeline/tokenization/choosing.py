"""Which shards the tokenizer stage reads: enough of them, chosen by their hashes; never the whole of a large corpus."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any

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
    sizes = {source: sum(record["text_bytes"] for record in own) for source, own in by_source(records).items()}
    total = max(1, sum(sizes.values()))
    if total <= COVER * train_bytes:
        return list(records), dict.fromkeys(sizes, train_bytes / total)
    paths, shares = set(), {}
    for source, own in by_source(records).items():
        wanted, covered = train_bytes * sizes[source] / total, 0
        for record in by_hash(own, seed):
            paths.add(record["path"])
            covered += record["text_bytes"]
            if covered >= COVER * wanted:
                break
        shares[source] = wanted / max(1, covered)
    return [record for record in records if record["path"] in paths], shares


def heldout_beginnings(records: Sequence[Record], most_bytes: float) -> list[tuple[Record, int | None]]:
    """The held-out shards to check, and of how many bytes from the beginning on: None is all of it.

    Of a source with at most `most_bytes` of text everything; else so much, from beginnings of shards chosen by hash.
    """
    limits: dict[str, int | None] = {}
    for own in by_source(records).values():
        if sum(record["text_bytes"] for record in own) <= most_bytes:
            limits |= {record["path"]: None for record in own}
        else:
            chosen = by_hash(own)[:MOST_LOOKED_AT]
            limits |= {record["path"]: int(most_bytes) // len(chosen) for record in chosen}
    return [(record, limits[record["path"]]) for record in records if record["path"] in limits]


def looked_at(records: Sequence[Record], most_bytes: int) -> list[tuple[Record, int]]:
    """The training shards whose beginnings are looked at, `most_bytes` in all, and how many bytes of each."""
    chosen = records if len(records) <= MOST_LOOKED_AT else by_hash(records)[:MOST_LOOKED_AT]
    return [(record, most_bytes // max(1, len(chosen))) for record in chosen]


def by_source(records: Iterable[Record]) -> dict[str, list[Record]]:
    """The shards of each source."""
    found: dict[str, list[Record]] = {}
    for record in records:
        found.setdefault(record["source"], []).append(record)
    return found
