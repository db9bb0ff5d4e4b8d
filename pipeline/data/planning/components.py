"""Connected components of documents that share bands: each is known by its first document, which is kept.

One unit. It holds a bit a document of the corpus, a count for 64 of them, and 8 bytes a document that has an edge:
1 GB where 10^8 of 10^9 documents have one. Edges are read twice, some million at a time. The first document of a
component is what it is, in whichever order edges come.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.data.planning.near import EDGE, band_name, edges_path
from pipeline.data.planning.runs import Layout, group_name, read_partition
from pipeline.data.reading import STAGING
from pipeline.errors import UnusableInputError
from pipeline.files import atomic_file, output_record

EDGES_AT_ONCE = 4_000_000
LABEL = np.dtype([("place", "<u4"), ("kept", "<u8")])
"""A document that is not the first of its component: its place in the group, and the number of the first."""


def labels_path(folder: Path) -> Path:
    """Rows of LABEL by group and place, after the number of rows before each group and their end."""
    return folder / STAGING / "labels"


def components_payload(layout: Layout, bands: int, edges: str) -> dict[str, Any]:
    """What `label_components` needs; edges: a hash of all edges."""
    return {"starts": layout.group_starts, "bands": bands, "partitions": layout.partitions, "keep": layout.keep,
            "edges": edges}


def label_components(folder: Path, payload: dict[str, Any]) -> dict[str, Any]:
    """Write the first document of each one's component.

    Returns the number of documents with an edge as `nodes`, of `components`, and the file as `outputs`.
    """
    starts, backwards = payload["starts"], payload["keep"] == "last"
    total = starts[-1]
    names = [*(group_name(group) for group in range(len(starts) - 1)),
             *(band_name(band, partition) for band in range(payload["bands"])
               for partition in range(payload["partitions"]))]
    paths = [edges_path(folder, name) for name in names]
    nodes = Nodes(total)
    for first, other in _edges(paths, total, backwards):
        nodes.add(first)
        nodes.add(other)
    nodes.number()
    parent = np.arange(nodes.count, dtype=np.uint32)
    for first, other in _edges(paths, total, backwards):
        join(parent, nodes.places(first), nodes.places(other))
    flatten(parent)
    path = labels_path(folder)
    written = _write(path, nodes, parent, starts, backwards)
    return {"nodes": nodes.count, "components": nodes.count - written, "outputs": [output_record(folder, path)]}


def _edges(paths: Sequence[Path], total: int, backwards: bool) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Both ends of all edges, ranked so that the smallest is the one to be kept."""
    for path in paths:
        with open(path, "rb") as file:
            while len(edges := np.fromfile(file, EDGE, EDGES_AT_ONCE)):
                first, other = edges["first"].astype(np.int64), edges["other"].astype(np.int64)
                yield (total - 1 - first, total - 1 - other) if backwards else (first, other)


class Nodes:
    """The documents that have an edge, among all, and their places among themselves.

    Attributes:
        count: how many they are, once they are numbered.
    """

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
        """Give those that were added their places, in order.

        Raises:
            UnusableInputError: they are too many.
        """
        counts = np.bitwise_count(self.bits)
        self.count = int(counts.sum(dtype=np.int64))
        if self.count >= 2**32:
            raise UnusableInputError(f"{self.count:,} documents share a band of their signatures with another; the "
                                     f"components of 2^32 at most can be found. Take more rows a band "
                                     f"(shard.near_duplicates.rows).")
        self.before = np.zeros(len(counts), np.uint32)
        np.cumsum(counts[:-1], out=self.before[1:], dtype=np.uint32)

    def places(self, documents: np.ndarray) -> np.ndarray:
        """The places of documents that were added."""
        words = documents >> 6
        below = self.bits[words] & (_bit(documents) - np.uint64(1))
        return self.before[words] + np.bitwise_count(below)

    def documents(self) -> Iterator[np.ndarray]:
        """The ranks of all that were added, in order, some million at a time."""
        for start in range(0, len(self.bits), 2**18):
            bits = np.unpackbits(self.bits[start:start + 2**18].astype("<u8").view(np.uint8), bitorder="little")
            yield np.flatnonzero(bits) + 64 * start


def _bit(documents: np.ndarray) -> np.ndarray:
    return np.uint64(1) << (documents & 63).astype(np.uint64)


def join(parent: np.ndarray, first: np.ndarray, other: np.ndarray) -> None:
    """Make trees of nodes one where an edge joins them: the larger root is hung below the smaller one.

    Args:
        parent: of each node, itself for a root; no parent is larger than its child.
    """
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
        parent[nodes] = found = above  # halves the way for who comes next


def flatten(parent: np.ndarray) -> None:
    """Make every node's parent its root."""
    for start in range(0, len(parent), EDGES_AT_ONCE):
        part = parent[start:start + EDGES_AT_ONCE]  # what is before is flat
        while not ((above := parent[part]) == part).all():
            part[:] = above


def _write(path: Path, nodes: Nodes, parent: np.ndarray, starts: list[int], backwards: bool) -> int:
    """Write the labels of all nodes but the first of each component; how many."""
    total, counts, begin = starts[-1], np.zeros(len(starts), np.int64), 0
    ranks = np.empty(nodes.count, np.uint32 if total < 2**32 else np.int64)  # of all nodes, by place
    for part in nodes.documents():
        ranks[begin:begin + len(part)] = part
        begin += len(part)
    with atomic_file(path) as file:
        file.write(bytes(8 * len(starts)))
        pieces = range(0, nodes.count, EDGES_AT_ONCE)
        for start in reversed(pieces) if backwards else pieces:
            own = np.arange(start, min(start + EDGES_AT_ONCE, nodes.count))
            own = own[parent[own] != own][::-1 if backwards else 1]
            number, kept = ranks[own].astype(np.int64), ranks[parent[own]].astype(np.int64)
            if backwards:
                number, kept = total - 1 - number, total - 1 - kept
            group = np.searchsorted(starts, number, "right") - 1
            rows = np.empty(len(own), LABEL)
            rows["place"], rows["kept"] = number - np.array(starts)[group], kept
            rows.tofile(file)
            counts[1:] += np.bincount(group, minlength=len(starts) - 1)
        file.seek(0)
        file.write(np.cumsum(counts).astype("<u8").tobytes())
    return int(counts.sum())


def read_labels(folder: Path, group: int, groups: int) -> np.ndarray:
    """Rows of LABEL of one group, by place."""
    return read_partition(labels_path(folder), LABEL, group, groups)
