"""Connected components of documents that share bands; each is known by its first document.

One unit of work. Its memory follows from the number of documents, not from the number of edges. Documents are cut into
stretches of their numbers, and one stretch is held at a time. From the last stretch to the first, the documents of a
stretch are joined along the edges among them. Of the earlier documents that a tree has edges with, the first becomes
its parent, and the others get an edge with that one, which belongs to an earlier stretch. So the rest of the graph has
the same components and no more edges. Then, from the first stretch to the last, each document takes its parent's label.
These are two sweeps whatever the graph; a long chain needs no more rounds. An edge takes 12 bytes on the disk, and is
written once a stretch at most. (Removing nodes from the last on: Dementiev, Sanders, Schultes and Sibeyn, Engineering
an External Memory Minimum Spanning Tree Algorithm, 2004.)
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from drover.pipeline.data.planning.layout import Layout
from drover.pipeline.data.planning.runs import DIGEST, LINK, link_paths
from drover.pipeline.data.reading import STAGING
from drover.pipeline.files import atomic_file, output_record

STRETCH, STRETCHES = 1 << 24, 128
"""Documents of a stretch, each of 12 bytes in memory; and the most stretches. From 2 x 10^9 documents on, stretches are
larger."""
AT_ONCE = 1 << 20
"""Edges or documents that are handled at once."""
NONE = np.iinfo(np.int64).max

# Below, a document is known by its rank: its number, or counted from the end where the last is the one to be kept.
EDGE = np.dtype([("place", "<u4"), ("rank", "<u8")])
"""A document by its place in its stretch, and the rank of an earlier one."""


def labels_path(folder: Path) -> Path:
    """The rank of the first document of each one's component, by rank."""
    return folder / STAGING / "labels"


def label_components(folder: Path, payload: dict[str, Any]) -> dict[str, Any]:
    """Write the first document of each one's component. Returns the file as `outputs`."""
    plan, path = Layout.read(folder), labels_path(folder)
    total = plan.starts[-1]
    path.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(".tmp", "components.", path.parent, ignore_cleanup_errors=True) as spills:
        graph = Graph(Path(spills), total, max(STRETCH, -(-total // STRETCHES)))
        for links in _links(folder, plan):
            one, other = (links[end].astype(np.int64) for end in ("other", "kept"))
            graph.add(*((total - 1 - one, total - 1 - other) if plan.last else (one, other)))
        with atomic_file(path) as file:
            for start in reversed(range(0, total, graph.size)):
                file.seek(8 * start)
                for parents in graph.parents(start):
                    file.write(parents.astype("<u8").data)
            for start in range(0, total, graph.size):
                file.flush()
                labels = np.memmap(file.name, "<u8", "r")  # those before the stretch are final
                for begin in range(start, min(start + graph.size, total), AT_ONCE):
                    own = np.array(labels[begin:min(begin + AT_ONCE, start + graph.size)])
                    before = np.flatnonzero(own < start)
                    own[before] = labels[own[before]]
                    file.seek(8 * begin)
                    file.write(own.data)
    return {"outputs": [output_record(folder, path)]}


def read_labels(folder: Path, plan: Layout, group: int) -> np.ndarray:
    """The number of the first document of each one's component, for the documents of a group."""
    begin, end = plan.bounds(group)
    total = plan.starts[-1]
    first, stop = (total - end, total - begin) if plan.last else (begin, end)
    labels = np.fromfile(labels_path(folder), "<u8", stop - first, offset=8 * first).astype(np.int64)
    return total - 1 - labels[::-1] if plan.last else labels


def _links(folder: Path, plan: Layout) -> Iterator[np.ndarray]:
    """The links of all bands."""
    groups = range(len(plan.groups) - 1)
    for path in (path for band in range(plan.bands) for path in link_paths(folder, plan, DIGEST + 1 + band, groups)):
        with open(path, "rb") as file:
            file.seek(8 * len(plan.groups))
            while len(links := np.fromfile(file, LINK, AT_ONCE)):
                yield links


class Graph:
    """Edges between documents, of which a stretch is held at a time: first all are added, then each stretch gets its
    parents, from the last to the first.

    Args:
        folder: for the edges.
        documents: how many there are, with edges or without.
        size: documents of a stretch.
    """

    def __init__(self, folder: Path, documents: int, size: int) -> None:
        self.folder, self.documents, self.size = folder, documents, size

    def add(self, one: np.ndarray, other: np.ndarray) -> None:
        """Add edges, given by the ranks of both ends. An edge is kept with the later of them.

        Raises:
            OSError: the disk is full or does not work; the error names the file.
        """
        later, rows = np.maximum(one, other), np.empty(len(one), EDGE)
        stretch = later // self.size
        rows["place"], rows["rank"] = later % self.size, np.minimum(one, other)
        rows, counts = rows[np.argsort(stretch.astype(np.uint16), kind="stable")], np.bincount(stretch)
        ends = np.cumsum(counts)
        for number in np.flatnonzero(counts).tolist():
            path = self.folder / str(number)
            try:
                with open(path, "ab") as file:
                    file.write(rows[ends[number] - counts[number]:ends[number]].data)
            except OSError as error:
                raise OSError(error.errno, os.strerror(error.errno or 0), str(path)) from error

    def parents(self, start: int) -> Iterator[np.ndarray]:
        """The parents of the documents of the stretch that starts there, in order, some at a time: of each tree the
        first earlier document that it has an edge with; its root where there is none."""
        parent = np.arange(min(self.size, self.documents - start), dtype=np.uint32)
        for rows in self._edges(start):
            inside = rows["rank"] >= start
            join(parent, rows["place"][inside].astype(np.intp), (rows["rank"][inside] - start).astype(np.intp))
        flatten(parent)
        earlier = np.full(len(parent), NONE)  # of roots
        for rows in self._edges(start):
            before = rows["rank"] < start
            np.minimum.at(earlier, parent[rows["place"][before]].astype(np.intp), rows["rank"][before].astype(np.int64))
        for rows in self._edges(start):
            one, other = earlier[parent[rows["place"]]], rows["rank"].astype(np.int64)
            further = (other < start) & (one != other)
            self.add(one[further], other[further])
        (self.folder / str(start // self.size)).unlink(missing_ok=True)
        for begin in range(0, len(parent), AT_ONCE):
            roots = parent[begin:begin + AT_ONCE]
            yield np.where(earlier[roots] == NONE, start + roots.astype(np.int64), earlier[roots])

    def _edges(self, start: int) -> Iterator[np.ndarray]:
        path = self.folder / str(start // self.size)
        if path.is_file():
            with open(path, "rb") as file:
                while len(rows := np.fromfile(file, EDGE, AT_ONCE)):
                    yield rows


def join(parent: np.ndarray, first: np.ndarray, other: np.ndarray) -> None:
    """Join trees of nodes along edges: the larger root gets the smaller one as its parent.

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
        parent[nodes] = found = above  # halves the path for later calls


def flatten(parent: np.ndarray) -> None:
    """Make every node's parent its root."""
    for start in range(0, len(parent), AT_ONCE):
        part = parent[start:start + AT_ONCE]  # what is before is flat
        while not ((above := parent[part]) == part).all():
            part[:] = above
