"""Counts of reading token shards from an object store, so that no fallback goes unnoticed."""

from __future__ import annotations

import threading
from dataclasses import asdict, dataclass

_LOCK = threading.Lock()


@dataclass
class Figures:
    """Counts of one process, which its threads share.

    Attributes:
        hits: reads of shards that were in the node's cache.
        fetched, fetched_bytes: shards that were fetched whole into it, and compared with their hashes.
        ranges, range_bytes: requests for parts of shards, which no hash verifies.
        removed: shards that were removed from the cache to make room.
        retries: requests that were made again after an error.
        wait_s: seconds in which a reader waited for the store; less than that training waits, which reads ahead.
    """

    hits: int = 0
    fetched: int = 0
    fetched_bytes: int = 0
    ranges: int = 0
    range_bytes: int = 0
    removed: int = 0
    retries: int = 0
    wait_s: float = 0.0

    def add(self, **counts: float) -> None:
        """Add to some of them."""
        with _LOCK:
            for name, count in counts.items():
                setattr(self, name, getattr(self, name) + count)

    def values(self) -> dict[str, float]:
        """All of them by name."""
        with _LOCK:
            return asdict(self)


def told(figures: dict[str, float]) -> str:
    """The figures of all ranks in one sentence."""
    parts = [f"{figures['fetched']:,.0f} shards fetched ({figures['fetched_bytes'] / 1e6:,.1f} MB)",
             f"{figures['hits']:,.0f} found in the cache"]
    if figures["ranges"]:
        parts.append(f"{figures['ranges']:,.0f} parts read without a shard's hash "
                     f"({figures['range_bytes'] / 1e6:,.1f} MB)")
    if figures["removed"]:
        parts.append(f"{figures['removed']:,.0f} removed to make room")
    if figures["retries"]:
        parts.append(f"{figures['retries']:,.0f} requests repeated")
    return f"{', '.join(parts)}; readers waited {figures['wait_s']:,.1f} s"
