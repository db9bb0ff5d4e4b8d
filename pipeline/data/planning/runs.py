"""Sorted runs of digests: one a group of units, cut into partitions of equal ranges of digests.

A document's number counts all staged documents before it, so numbers are in the order of sources, files and records.
A group is a stretch of units that one process holds in memory (24 bytes a document in its run). Of equal documents a
run has one row, with how many there are: what one group holds of a page that is copied 10^8 times is a row, and no
later pass holds more of it than a row a group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.data.reading import STAGING, staged
from pipeline.errors import UserError
from pipeline.files import atomic_file, output_record

GROUP_DOCUMENTS, GROUP_UNITS = 4_000_000, 256
"""A group ends before it has more documents or units."""
PARTITION_ROWS = 4_000_000
"""Documents of a partition, at most, if none are equal."""

RUN = np.dtype([("high", "<u8"), ("low", "<u8"), ("first", "<u4"), ("count", "<u4")])
"""A digest of the group: its two halves, the place in the group of the first document that has it, how many have it."""
EQUAL = np.dtype([("place", "<u4"), ("first", "<u4"), ("copy", "<u4")])
"""A document that is not the first of its equals in the group: its place, that of the first, how many are before."""


@dataclass(frozen=True)
class Layout:
    """How the staged units are grouped and the digests are parted. It depends on the documents alone.

    Attributes:
        names: of the units, in order.
        sources: (units,) number of each unit's source.
        starts: (units + 1,) documents before each unit.
        groups: (groups + 1,) units before each group.
        partitions: a power of two.
        keep: which of equal documents stays, `first` or `last`. With `last`, everything that says first below means
            the last, and before means after.
    """

    names: Sequence[str]
    sources: np.ndarray
    starts: np.ndarray
    groups: np.ndarray
    partitions: int
    keep: str

    @property
    def group_starts(self) -> list[int]:
        """Documents before each group, and at the end all."""
        return [int(start) for start in self.starts[self.groups]]

    def units(self, group: int) -> range:
        """Numbers of a group's units."""
        return range(int(self.groups[group]), int(self.groups[group + 1]))


def layout(names: Sequence[str], sources: Sequence[int], documents: Sequence[int], keep: str = "first") -> Layout:
    """Group units of these numbers of documents."""
    borders, held = [0], 0
    for unit, own in enumerate(documents):
        if unit > borders[-1] and (unit - borders[-1] == GROUP_UNITS or held + own > GROUP_DOCUMENTS):
            borders.append(unit)
            held = 0
        held += own
    borders.append(len(documents))
    starts = np.concatenate([[0], np.cumsum(documents, dtype=np.int64)])
    partitions = 1 << (ceil(max(1, int(starts[-1])) / PARTITION_ROWS) - 1).bit_length()
    return Layout(names, np.array(sources, np.int64), starts, np.array(borders), partitions, keep)


def group_name(group: int) -> str:
    """Name of a group's unit and files."""
    return f"group-{group:06d}"


def run_path(folder: Path, group: int) -> Path:
    """The group's run: for each partition and for their end the number of rows before, then the rows."""
    return folder / STAGING / "runs" / f"{group_name(group)}.run"


def equals_path(folder: Path, group: int) -> Path:
    """Rows of EQUAL of a group, by place."""
    return folder / STAGING / "runs" / f"{group_name(group)}.equal.npy"


def sort_payload(layout: Layout, group: int, indexes: Sequence[str]) -> dict[str, Any]:
    """What `sort_group` needs; indexes: hashes of the indexes of all units, or of all that is sorted of them."""
    units = layout.units(group)
    return {"group": group, "start": int(layout.starts[units.start]),
            "units": [layout.names[unit] for unit in units],
            "documents": [int(layout.starts[unit + 1] - layout.starts[unit]) for unit in units],
            "indexes": [indexes[unit] for unit in units], "partitions": layout.partitions, "keep": layout.keep}


def sort_group(folder: Path, payload: dict[str, Any]) -> dict[str, Any]:
    """Write the run of one group, and which of its documents have an equal one before them in the group.

    Returns the files as `outputs`, the run first.
    """
    group, backwards = payload["group"], payload["keep"] == "last"
    high, low = digests(folder, payload["units"], payload["documents"])
    order = by_digest(high, low, backwards)
    new = first_of_equals(high[order], low[order])
    starts = np.flatnonzero(new)
    counts = np.diff(np.append(starts, len(order)))
    firsts = order[starts]
    rows = np.empty(len(starts), RUN)
    rows["high"], rows["low"], rows["first"], rows["count"] = high[firsts], low[firsts], firsts, counts
    write_partitioned(run_path(folder, group), rows, partition_offsets(rows["high"], payload["partitions"]))
    equal = np.empty(len(order) - len(starts), EQUAL)
    equal["place"], equal["first"] = order[~new], np.repeat(firsts, counts - 1)
    equal["copy"] = (np.arange(len(order)) - np.repeat(starts, counts))[~new]
    with atomic_file(equals_path(folder, group)) as file:
        np.save(file, equal[np.argsort(equal["place"])])
    return {"outputs": [output_record(folder, path) for path in (run_path(folder, group), equals_path(folder, group))]}


def digests(folder: Path, units: Sequence[str], documents: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """Both halves of the digests of all documents of some units, in order.

    Raises:
        UserError: an index has another number of documents than the reading said.
    """
    halves: list[list[np.ndarray]] = [[], []]
    for unit, count in zip(units, documents, strict=True):
        index = np.load(staged(folder, unit, ".npy"), mmap_mode="r")
        if len(index) != count:
            raise UserError(f"{staged(folder, unit, '.npy')} has {len(index)} documents instead of {count}. Delete it "
                            f"and run the stage again: it reads that unit anew.")
        for half, name in zip(halves, ("high", "low"), strict=True):
            half.append(np.ascontiguousarray(index[name]))
    high, low = (np.concatenate(half) if half else np.empty(0, np.uint64) for half in halves)
    return high, low


def by_digest(high: np.ndarray, low: np.ndarray, backwards: bool = False) -> np.ndarray:
    """The order of digests; equal ones stay in their order, or with `backwards` are turned round."""
    if backwards:
        return len(high) - 1 - by_digest(high[::-1], low[::-1])
    order = np.argsort(high, kind="stable")
    sorted_high, sorted_low = high[order], low[order]
    if ((sorted_high[1:] == sorted_high[:-1]) & (sorted_low[1:] < sorted_low[:-1])).any():
        order = np.lexsort((low, high))  # three times as slow; two digests hardly ever agree in a half
    return order


def first_of_equals(*keys: np.ndarray) -> np.ndarray:
    """Of sorted keys, where a new one begins."""
    new = np.ones(len(keys[0]), bool)
    new[1:] = np.logical_or.reduce([key[1:] != key[:-1] for key in keys])
    return new


def partition_offsets(high: np.ndarray, partitions: int) -> np.ndarray:
    """For each partition and their end, how many of the sorted 64-bit digests are before it."""
    borders = np.array([number * (2**64 // partitions) for number in range(1, partitions)], np.uint64)
    return np.concatenate([[0], np.searchsorted(high, borders), [len(high)]]).astype("<u8")


def write_partitioned(path: Path, rows: np.ndarray, offsets: np.ndarray) -> None:
    """Rows after the offsets of their partitions."""
    with atomic_file(path) as file:
        file.write(offsets.astype("<u8").tobytes())
        np.ascontiguousarray(rows).tofile(file)


def read_partition(path: Path, dtype: np.dtype, partition: int, partitions: int) -> np.ndarray:
    """The rows of one partition.

    Raises:
        UserError: the file is torn.
    """
    with open(path, "rb") as file:
        file.seek(8 * partition)
        bounds = np.frombuffer(file.read(16), "<u8")
        if len(bounds) == 2:
            file.seek(8 * (partitions + 1) + int(bounds[0]) * dtype.itemsize)
            rows = np.fromfile(file, dtype, int(bounds[1] - bounds[0]))
            if len(rows) == bounds[1] - bounds[0]:
                return rows
    raise UserError(f"{path} ends before its partition {partition} of {partitions}. Delete it and run the stage again: "
                    f"it makes it anew. Check the disk if this happens twice.")
