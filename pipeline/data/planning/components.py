"""Connected components of documents that share bands; each is known by its first document.

One unit of work, which holds 4 bytes a document (8 from 2^32 documents on) and some 40 for each that is no first, and
reads the links a part at a time. It writes the label of every document (the first of its component), and the followers:
those that are not the first of theirs, sorted by component and cut into parts between components.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from drover.pipeline.data.planning.layout import Layout
from drover.pipeline.data.planning.runs import DIGEST, LINK, links_path, read_rows, write_rows
from drover.pipeline.data.reading import STAGING
from drover.pipeline.files import atomic_file, output_record

AT_ONCE = 1 << 20
"""Links or documents that are handled at once."""


def _labels(folder: Path) -> Path:
    return folder / STAGING / "labels"


def _followers(folder: Path) -> Path:
    return folder / STAGING / "followers"


def label_components(folder: Path, payload: dict[str, Any]) -> dict[str, Any]:
    """Write labels and followers. Returns the files as `outputs`."""
    plan = Layout.read(folder)
    total = plan.starts[-1]

    def ranks(numbers: np.ndarray) -> np.ndarray:
        """Numbers, or counted from the end where the last is the one to be kept; the same again gives the numbers."""
        found = numbers.astype(np.int64)
        return total - 1 - found if plan.last else found
    parent = np.arange(total, dtype=np.uint32 if total < 1 << 32 else np.uint64)
    for links in _links(folder, plan):
        join(parent, ranks(links["other"]), ranks(links["kept"]))
    flatten(parent)
    others = np.flatnonzero(parent != np.arange(total, dtype=parent.dtype))
    others = others[np.argsort(parent[others], kind="stable")]
    firsts = parent[others]
    borders = firsts.searchsorted(firsts[np.arange(1, plan.partitions) * len(others) // plan.partitions]) \
        if len(others) else np.zeros(plan.partitions - 1, np.int64)
    rows = np.empty(len(others), LINK)
    rows["other"], rows["kept"] = ranks(others), ranks(firsts)
    made = [write_rows(folder, _followers(folder), rows, np.concatenate([[0], borders, [len(rows)]]))]
    with atomic_file(_labels(folder)) as file:
        for start in range(0, total, AT_ONCE):
            own = parent[::-1][start:start + AT_ONCE] if plan.last else parent[start:start + AT_ONCE]
            file.write(ranks(own).tobytes())
    return {"outputs": [*made, output_record(folder, _labels(folder))]}


def read_labels(folder: Path, plan: Layout, group: int) -> np.ndarray:
    """The number of the first document of each one's component, for the documents of a group."""
    begin, end = plan.bounds(group)
    return np.fromfile(_labels(folder), np.int64, end - begin, offset=8 * begin)


def read_followers(folder: Path, plan: Layout, part: int) -> np.ndarray:
    """The followers of a part of the components: the number of each as `other`, of the first of its component as
    `kept`; components one after another, each in order."""
    return read_rows(_followers(folder), LINK, part, plan.partitions)


def _links(folder: Path, plan: Layout) -> Iterator[np.ndarray]:
    """The links of all bands."""
    names = [*plan.group_names, *plan.partition_names]
    for band, name in product(range(plan.bands), names):
        with open(links_path(folder, DIGEST + 1 + band, name), "rb") as file:
            file.seek(8 * len(plan.groups))
            while len(links := np.fromfile(file, LINK, AT_ONCE)):
                yield links


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
