"""How the staged documents are numbered, grouped and partitioned, and access to one of them by its number.

A document's number counts all staged documents before it, so numbers follow the order of sources, files and records.
A group is a range of units that one process holds in memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from math import ceil
from pathlib import Path
from typing import Any

import numpy as np

from drover.pipeline.data.documents import Document, from_json
from drover.pipeline.data.reading import STAGING, staged
from drover.pipeline.errors import UserError
from drover.pipeline.files import read_json, write_json

GROUP_DOCUMENTS, GROUP_UNITS = 4_000_000, 256
"""A group ends before it has more documents or units."""
PARTITION_ROWS = 4_000_000
"""Largest number of documents in a partition if none are equal."""
_INDEXES_AT_ONCE = 32


@dataclass(frozen=True)
class Layout:
    """Groups of units, partitions of keys. It follows from the documents and the settings alone.

    Attributes:
        names: of the units, in order.
        sources: number of each unit's source.
        starts: (units + 1,) documents before each unit.
        groups: (groups + 1,) units before each group.
        partitions: number of partitions, a power of two.
        last: whether the last of equal documents stays. Then everything below that says first means the last, and
            before means after.
        bands: numbers in a MinHash signature; 0 where near-duplicates stay.
    """

    names: list[str]
    sources: list[int]
    starts: list[int]
    groups: list[int]
    partitions: int
    last: bool
    bands: int

    def write(self, folder: Path) -> None:
        """Write it for the processes that do the units."""
        write_json(folder / STAGING / "layout.json", asdict(self), keep_equal=True)

    @staticmethod
    def read(folder: Path) -> Layout:
        """Read what `write` wrote."""
        return Layout(**read_json(folder / STAGING / "layout.json"))

    @property
    def group_names(self) -> list[str]:
        """Names of the groups' units of work."""
        return [f"group-{group:06d}" for group in range(len(self.groups) - 1)]

    @property
    def partition_names(self) -> list[str]:
        """What partitions are called."""
        return [f"partition-{partition:06d}" for partition in range(self.partitions)]

    @property
    def group_starts(self) -> np.ndarray:
        """Documents before each group, and all at the end."""
        return np.array(self.starts, np.int64)[self.groups]

    def bounds(self, group: int) -> tuple[int, int]:
        """Number of a group's first document, and of the one after its last."""
        return self.starts[self.groups[group]], self.starts[self.groups[group + 1]]

    def units(self, group: int) -> range:
        """Numbers of a group's units."""
        return range(self.groups[group], self.groups[group + 1])

    def column(self, folder: Path, group: int, ending: str, field: Any) -> np.ndarray:
        """A field of the staged .npy tables of a group's units, a row a document.

        Raises:
            UserError: a table has another number of documents than the reading counted.
        """
        parts = []
        for unit in self.units(group):
            path, count = staged(folder, self.names[unit], ending), self.starts[unit + 1] - self.starts[unit]
            parts.append(np.array(np.load(path, mmap_mode="r")[field]))
            if len(parts[-1]) != count:
                raise UserError(f"{path} has {len(parts[-1])} documents instead of {count}. Delete it and run the "
                                f"stage again: it reads that unit again.")
        return np.concatenate(parts)


def layout(names: Sequence[str], sources: Sequence[int], documents: Sequence[int], *, last: bool = False,
           bands: int = 0) -> Layout:
    """Group units of these numbers of documents."""
    borders, held = [0], 0
    for unit, own in enumerate(documents):
        if unit > borders[-1] and (unit - borders[-1] == GROUP_UNITS or held + own > GROUP_DOCUMENTS):
            borders.append(unit)
            held = 0
        held += own
    starts = np.cumsum([0, *documents], dtype=np.int64).tolist()
    partitions = 1 << (ceil(max(1, starts[-1]) / PARTITION_ROWS) - 1).bit_length()
    return Layout(list(names), list(sources), starts, [*borders, len(documents)], partitions, last, bands)


class StagedDocuments:
    """Staged documents by their numbers."""

    def __init__(self, folder: Path, plan: Layout) -> None:
        self.folder, self.names, self.starts = folder, plan.names, np.array(plan.starts)
        self._index = lru_cache(_INDEXES_AT_ONCE)(lambda name: np.load(staged(folder, name, ".npy"), mmap_mode="r"))

    def row(self, number: int) -> tuple[str, Any]:
        """The name of a document's unit, and its row of INDEX."""
        unit = int(np.searchsorted(self.starts, number, "right")) - 1
        return self.names[unit], self._index(self.names[unit])[number - self.starts[unit]]

    def document(self, number: int) -> Document:
        """The document, with its text."""
        return read_document(self.folder, *self.row(number))

    def named(self, number: int) -> tuple[str, str, tuple[int, int]]:
        """The document's id, its source and the digest of its text."""
        document, (_, row) = self.document(number), self.row(number)
        return document.id, document.source, (int(row["high"]), int(row["low"]))


def read_document(folder: Path, unit: str, row: Any) -> Document:
    """The document of a row of a unit's index."""
    with open(staged(folder, unit, ".documents"), "rb") as file:
        file.seek(int(row["offset"]))
        return from_json(file.read(int(row["length"])), "")
