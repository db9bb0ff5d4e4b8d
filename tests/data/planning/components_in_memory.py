"""Components as one process finds them with all documents that have an edge in memory: what the passes are compared
with.

This is how the unit itself worked before it held a stretch of documents at a time, kept as it was.
"""

from __future__ import annotations

from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.data.planning.near import EDGE

LABEL = np.dtype([("place", "<u4"), ("kept", "<u8")])


def labels_in_memory(paths: list[Path], starts: list[int], keep: str) -> tuple[bytes, dict[str, Any]]:
    """The labels' file of these files of edges, and how many documents have an edge, in how many components."""
    backwards, total = keep == "last", starts[-1]
    nodes = Nodes(total)
    for first, other in _edges(paths, total, backwards):
        nodes.add(first)
        nodes.add(other)
    nodes.number()
    parent = np.arange(nodes.count, dtype=np.uint32)
    for first, other in _edges(paths, total, backwards):
        join(parent, nodes.places(first), nodes.places(other))
    flatten(parent)
    content, written = _content(nodes, parent, starts, backwards)
    return content, {"nodes": nodes.count, "components": nodes.count - written}


def _edges(paths: list[Path], total: int, backwards: bool) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    for path in paths:
        edges = np.fromfile(path, EDGE)
        first, other = edges["first"].astype(np.int64), edges["other"].astype(np.int64)
        yield (total - 1 - first, total - 1 - other) if backwards else (first, other)


class Nodes:
    """The documents that have an edge, among all, and their places among themselves."""

    def __init__(self, total: int) -> None:
        self.bits = np.zeros(-(-total // 64), np.uint64)
        self.before = np.zeros(0, np.uint32)
        self.count = 0

    def add(self, documents: np.ndarray) -> None:
        """Note documents, by their ranks."""
        documents = np.sort(documents)
        words = documents >> 6
        starts = np.flatnonzero(np.diff(words, prepend=-1))
        if len(starts):
            self.bits[words[starts]] |= np.bitwise_or.reduceat(_bit(documents), starts)

    def number(self) -> None:
        """Give those that were added their places, in order."""
        counts = np.bitwise_count(self.bits)
        self.count = int(counts.sum(dtype=np.int64))
        self.before = np.zeros(len(counts), np.uint32)
        np.cumsum(counts[:-1], out=self.before[1:], dtype=np.uint32)

    def places(self, documents: np.ndarray) -> np.ndarray:
        """The places of documents that were added."""
        words = documents >> 6
        below = self.bits[words] & (_bit(documents) - np.uint64(1))
        return self.before[words] + np.bitwise_count(below)

    def documents(self) -> np.ndarray:
        """The ranks of all that were added, in order."""
        return np.flatnonzero(np.unpackbits(self.bits.astype("<u8").view(np.uint8), bitorder="little"))


def _bit(documents: np.ndarray) -> np.ndarray:
    return np.uint64(1) << (documents & 63).astype(np.uint64)


def join(parent: np.ndarray, first: np.ndarray, other: np.ndarray) -> None:
    """Make trees of nodes one where an edge joins them: the larger root is hung below the smaller one."""
    while len(first):
        first, other = _roots(parent, first), _roots(parent, other)
        apart = first != other
        first, other = first[apart], other[apart]
        np.minimum.at(parent, np.maximum(first, other), np.minimum(first, other))


def _roots(parent: np.ndarray, nodes: np.ndarray) -> np.ndarray:
    found = parent[nodes]
    while True:
        above = parent[found]
        if (above == found).all():
            return found
        parent[nodes] = found = above


def flatten(parent: np.ndarray) -> None:
    """Make every node's parent its root."""
    while not ((above := parent[parent]) == parent).all():
        parent[:] = above


def _content(nodes: Nodes, parent: np.ndarray, starts: list[int], backwards: bool) -> tuple[bytes, int]:
    total, counts, ranks = starts[-1], np.zeros(len(starts), np.int64), nodes.documents()
    own = np.flatnonzero(parent != np.arange(nodes.count))[::-1 if backwards else 1]
    number, kept = ranks[own].astype(np.int64), ranks[parent[own]].astype(np.int64)
    if backwards:
        number, kept = total - 1 - number, total - 1 - kept
    group = np.searchsorted(starts, number, "right") - 1
    rows = np.empty(len(own), LABEL)
    rows["place"], rows["kept"] = number - np.array(starts)[group], kept
    counts[1:] += np.bincount(group, minlength=len(starts) - 1)
    file = BytesIO()
    file.write(np.cumsum(counts).astype("<u8").tobytes())
    file.write(rows.tobytes())
    return file.getvalue(), len(own)
