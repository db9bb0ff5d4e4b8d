"""Connected components of documents that share bands: each is known by its first document, which is kept.

One unit, whose memory follows from the numbers of the documents, not from how many edges there are. Documents are cut
into stretches of their numbers, of which it holds one at a time. From the last stretch to the first, the documents of a
stretch are joined along the edges among them; of all that its joined documents have an edge with in earlier stretches
the first is what they hang on, and the others get an edge with that one, which is a matter of earlier stretches alone.
So what is left of the graph says the same of what is left of the documents, and it becomes no larger: an edge is
written once a stretch at most. Then, from the first stretch to the last, each learns the label of what it hangs on.
These are two sweeps whatever the graph, with no rounds that a long chain could make more of, and at most 24 bytes an
edge on the disk, mostly 12. (Removing nodes from the last on: Dementiev, Sanders, Schultes and Sibeyn, Engineering an
External Memory Minimum Spanning Tree Algorithm, 2004.)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np

from pipeline.data.planning.near import EDGE, band_name, edges_path
from pipeline.data.planning.runs import Layout, group_name, read_partition
from pipeline.data.planning.spills import Spills
from pipeline.data.reading import STAGING
from pipeline.files import atomic_file, output_record

STRETCH, STRETCHES = 1 << 24, 128
"""Documents of a stretch, each of 12 bytes in memory; and how many stretches there are at most, each of which has three
open files. So from 2 x 10^9 documents on stretches are larger."""
AT_ONCE = 1 << 20
"""Edges or documents that are handled at once."""
NONE = np.iinfo(np.int64).max
LABEL = np.dtype([("place", "<u4"), ("kept", "<u8")])
"""A document that is not the first of its component: its place in the group, and the number of the first."""

# Below, a document is known by its rank: its number, or counted from the end where the last is the one to be kept.
INSIDE = np.dtype([("place", "<u4"), ("other", "<u4")])
"""Two documents of a stretch, by their places in it."""
ACROSS = np.dtype([("place", "<u4"), ("rank", "<u8")])
"""A document by its place in its stretch, and one of another stretch."""


def labels_path(folder: Path) -> Path:
    """Rows of LABEL by group and place, after the number of rows before each group and their end."""
    return folder / STAGING / "labels"


def components_payload(layout: Layout, bands: int, edges: str) -> dict[str, Any]:
    """What `label_components` needs; edges: a hash of all edges."""
    starts = layout.group_starts
    return {"starts": starts, "bands": bands, "partitions": layout.partitions, "keep": layout.keep, "edges": edges,
            "stretch": max(STRETCH, -(-starts[-1] // STRETCHES))}


def label_components(folder: Path, payload: dict[str, Any]) -> dict[str, Any]:
    """Write the first document of each one's component.

    Returns the number of documents that are like another as `nodes`, of `components`, and the file as `outputs`.
    """
    starts, backwards = payload["starts"], payload["keep"] == "last"
    names = [*(group_name(group) for group in range(len(starts) - 1)),
             *(band_name(band, partition) for band in range(payload["bands"])
               for partition in range(payload["partitions"]))]
    path = labels_path(folder)
    with Spills(path.parent, "components") as spills:
        graph = Graph(spills, starts[-1], payload["stretch"])
        for first, other in _edges([edges_path(folder, name) for name in names], starts[-1], backwards):
            graph.add(first, other)
        labelled = [graph.hang(stretch) for stretch in reversed(range(graph.stretches))][::-1]
        before = np.cumsum(labelled[::-1])[::-1] - labelled if backwards else np.cumsum(labelled) - labelled
        counts = np.zeros(len(starts) - 1, np.int64)
        with atomic_file(path) as file:
            for stretch in range(graph.stretches):
                file.seek(8 * len(starts) + int(before[stretch]) * LABEL.itemsize)
                counts += _write(file, graph.label(stretch), stretch * graph.size, starts, backwards)
            file.seek(0)
            file.write(np.concatenate([[0], np.cumsum(counts)]).astype("<u8").tobytes())
    return {"nodes": sum(labelled) + graph.components, "components": graph.components,
            "outputs": [output_record(folder, path)]}


def _edges(paths: Sequence[Path], total: int, backwards: bool) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Both ends of all edges, by rank."""
    for path in paths:
        with open(path, "rb") as file:
            while len(edges := np.fromfile(file, EDGE, AT_ONCE)):
                first, other = edges["first"].astype(np.int64), edges["other"].astype(np.int64)
                yield (total - 1 - first, total - 1 - other) if backwards else (first, other)


class Graph:
    """Edges between documents, of which a stretch is held at a time: first all are added, then each stretch is hung,
    from the last to the first, then each is labelled, from the first to the last.

    Args:
        documents: how many there are, with edges or without.
        size: documents of a stretch, the last one's excepted.

    Attributes:
        components: how many of more than one document begin in the stretches that are labelled.
    """

    def __init__(self, spills: Spills, documents: int, size: int) -> None:
        self.spills, self.documents, self.size = spills, documents, size
        self.stretches, self.components = -(-documents // size), 0

    def add(self, one: np.ndarray, other: np.ndarray) -> None:
        """Add edges, given by the ranks of both ends. An edge is kept with the later of them."""
        later, earlier = np.maximum(one, other), np.minimum(one, other)
        stretch = later // self.size
        inside = earlier // self.size == stretch
        for chosen, name, rows in ((inside, "inside", INSIDE), (~inside, "across", ACROSS)):
            base = self.size if name == "inside" else 0
            self._put(name, stretch[chosen], later[chosen] - self.size * stretch[chosen],
                      earlier[chosen] - base * stretch[chosen], rows)

    def hang(self, stretch: int) -> int:
        """Hang the documents of a stretch on what is before them; how many are the first of nothing."""
        parent = np.arange(self._length(stretch), dtype=np.uint32)
        for rows in self.spills.read(f"inside-{stretch}", INSIDE):
            join(parent, rows["place"].astype(np.intp), rows["other"].astype(np.intp))
        flatten(parent)
        earlier = np.full(len(parent), NONE)  # that roots have an edge with, the first of them
        for rows in self.spills.read(f"across-{stretch}", ACROSS):
            np.minimum.at(earlier, parent[rows["place"]].astype(np.intp), rows["rank"].astype(np.int64))
        for rows in self.spills.read(f"across-{stretch}", ACROSS):
            one, other = earlier[parent[rows["place"]]], rows["rank"].astype(np.int64)
            self.add(one[one != other], other[one != other])
        for name in ("inside", "across"):
            self.spills.remove(f"{name}-{stretch}")
        return sum(self._note(stretch, begin, parent, earlier) for begin in range(0, len(parent), AT_ONCE))

    def label(self, stretch: int) -> np.ndarray:
        """The rank of the first of each one's component."""
        start = stretch * self.size
        labels = np.arange(start, start + self._length(stretch))
        has_others = np.zeros(len(labels), bool)
        for rows in self.spills.read(f"answers-{stretch}", ACROSS):
            labels[rows["place"]] = rows["rank"]
        for rows in self.spills.read(f"hung-{stretch}", INSIDE):
            own = labels[rows["other"]]
            labels[rows["place"]] = own
            has_others[own[own >= start] - start] = True
        for rows in self.spills.read(f"asks-{stretch}", ACROSS):
            own, asking = labels[rows["place"]], rows["rank"].astype(np.int64)
            has_others[own[own >= start] - start] = True
            self._put("answers", asking // self.size, asking % self.size, own, ACROSS)
        for name in ("answers", "hung", "asks"):
            self.spills.remove(f"{name}-{stretch}")
        self.components += int(has_others.sum())
        return labels

    def _length(self, stretch: int) -> int:
        return min(self.size, self.documents - stretch * self.size)

    def _note(self, stretch: int, begin: int, parent: np.ndarray, earlier: np.ndarray) -> int:
        """Put aside what some documents of a stretch hang on: another of it, or one before, whose label they ask."""
        own, first = parent[begin:begin + AT_ONCE], earlier[begin:begin + AT_ONCE]
        hung = begin + np.flatnonzero(own != np.arange(begin, begin + len(own)))
        self._put("hung", np.full(len(hung), stretch), hung, parent[hung], INSIDE)
        asking = np.flatnonzero(first != NONE)
        asked = first[asking]
        self._put("asks", asked // self.size, asked % self.size, stretch * self.size + begin + asking, ACROSS)
        return len(hung) + len(asking)

    def _put(self, name: str, stretch: np.ndarray, places: np.ndarray, others: np.ndarray, dtype: np.dtype) -> None:
        """Put rows aside, each with what else there is of its stretch."""
        order = np.argsort(stretch.astype(np.uint16), kind="stable")
        rows = np.empty(len(order), dtype)
        rows["place"], rows[str(dtype.names[1])] = places[order], others[order]  # type: ignore[index]
        counts = np.bincount(stretch, minlength=self.stretches)
        for number, end in zip(np.flatnonzero(counts), np.cumsum(counts)[counts > 0], strict=True):
            self.spills.add(f"{name}-{number}", rows[end - counts[number]:end])


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
    for start in range(0, len(parent), AT_ONCE):
        part = parent[start:start + AT_ONCE]  # what is before is flat
        while not ((above := parent[part]) == part).all():
            part[:] = above


def _write(file: IO[bytes], labels: np.ndarray, start: int, starts: list[int], backwards: bool) -> np.ndarray:
    """Write the labels of those documents of a stretch that are not the first, by number; how many of each group."""
    total, counts = starts[-1], np.zeros(len(starts) - 1, np.int64)
    pieces = range(0, len(labels), AT_ONCE)
    for begin in reversed(pieces) if backwards else pieces:
        kept = labels[begin:begin + AT_ONCE]
        own = np.flatnonzero(kept != np.arange(start + begin, start + begin + len(kept)))
        number, kept = start + begin + own, kept[own]
        if backwards:
            number, kept = total - 1 - number[::-1], total - 1 - kept[::-1]
        group = np.searchsorted(starts, number, "right") - 1
        rows = np.empty(len(own), LABEL)
        rows["place"], rows["kept"] = number - np.array(starts)[group], kept
        file.write(rows.data)
        counts += np.bincount(group, minlength=len(counts))
    return counts


def read_labels(folder: Path, group: int, groups: int) -> np.ndarray:
    """Rows of LABEL of one group, by place."""
    return read_partition(labels_path(folder), LABEL, group, groups)
