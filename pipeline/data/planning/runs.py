"""Staged documents: where they are, and by their numbers, in groups and partitions; and those with equal keys, found in
two passes.

A document's number counts all staged documents before it, so numbers follow the order of sources, files and records.
A group is a range of units that one process holds in memory.

A document has several keys: column 0 is the digest of its text, the next ones are the bands of its signature. `sort`
writes, for each group and column, a run: one row a key, with the first document that has it, sorted by key and cut into
partitions of equal ranges of keys. `match` reads one partition of the runs of all groups. Both write links: a document,
and the first that has an equal key. So 10^8 copies of a page are a row a group and as many links, never pairs.

A document that has an equal one before it in its group has no bands: it is like that one.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from math import ceil, inf, isfinite
from pathlib import Path
from typing import Any, TypedDict
from zlib import crc32

import numpy as np

from drover.pipeline.core.errors import UserError
from drover.pipeline.core.files import Outputs, atomic_file, opened, output_record, read_json, write_json
from drover.pipeline.data.documents import Document, digest, from_json
from drover.pipeline.data.text_shards import SPLITS

STAGING = "staging"
INDEX = np.dtype([("high", "<u8"), ("low", "<u8"), ("offset", "<u8"), ("length", "<u8"), ("text_bytes", "<u8"),
                  ("characters", "<u8"), ("crc", "<u4"), ("u2581", "u1")])
"""A staged document: its digest as two numbers, place and size of its JSON, size of its text, the JSON's CRC-32, and
whether the text holds U+2581."""
_ROW = struct.Struct("<QQQQQQIB")


def staged(folder: Path, name: str, ending: str) -> Path:
    """Where a unit's staged file lies, a thousand units to a folder: `.documents` (JSON, one after another), `.npy`
    (rows of INDEX), `.rejected`, and where near-duplicates are looked for `.bands` (a row of `planning.near_duplicates`
    each, as .npy) and `.scores` (of a source that keeps the best documents, as .npy); later `.low` and
    `.fates` (see `planning.passes`)."""
    return folder / STAGING / name[:-3] / f"{name}{ending}"


def write_array(path: Path, rows: np.ndarray) -> Path:
    """Write an array as .npy. Returns the file."""
    with atomic_file(path) as file:
        np.save(file, rows)
    return path


def index_row(text: str, offset: int, member: bytes) -> bytes:
    """The row of `INDEX` for a text whose JSON is `member`, at `offset`."""
    data = text.encode()
    high, low = struct.unpack(">QQ", digest(data))
    return _ROW.pack(high, low, offset, len(member), len(data), len(text), crc32(member), "\u2581" in text)


def score_of(value: Any) -> float:
    """The score in a field of metadata, -inf if it holds no number."""
    try:
        return result if isfinite(result := float(value)) else -inf
    except (TypeError, ValueError, OverflowError):
        return -inf


TRAIN, VALIDATION, DUPLICATE, NEAR_DUPLICATE, LOW_SCORE = range(5)
OUTCOMES = (*SPLITS, "duplicate", "near_duplicate", "low_score")
"""What becomes of a document: a byte each in the staged file `.fates` of its unit, a .npy."""
SUMS = ("documents", "text_bytes", "characters", "u2581")
"""What is added up over documents: how many, UTF-8 bytes, characters, how many hold a U+2581."""
GROUP_DOCUMENTS, GROUP_UNITS = 4_000_000, 256
"""A group ends before it has more documents or units."""
PARTITION_ROWS = 4_000_000
"""Largest number of documents in a partition if none are equal."""
_UNITS_AT_ONCE = 32


@dataclass(frozen=True)
class CorpusLayout:
    """Groups of units, partitions of keys. It follows from the documents and the settings alone.

    Attributes:
        names: of the units, in order.
        sources: number of each unit's source.
        starts: (units + 1,) documents before each unit.
        groups: (groups + 1,) units before each group.
        partitions: number of partitions, a power of two.
        bands: numbers in a MinHash signature; 0 where near-duplicates stay.
    """

    names: list[str]
    sources: list[int]
    starts: list[int]
    groups: list[int]
    partitions: int
    bands: int

    def write(self, folder: Path) -> None:
        """Write it for the processes that do the units."""
        write_json(folder / STAGING / "layout.json", asdict(self), keep_equal=True)

    @staticmethod
    def read(folder: Path) -> CorpusLayout:
        """Read what `write` wrote."""
        return CorpusLayout(**read_json(folder / STAGING / "layout.json"))

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

    def documents(self, unit: int) -> int:
        """How many documents of a unit are staged."""
        return self.starts[unit + 1] - self.starts[unit]

    def column(self, folder: Path, group: int, ending: str, field: Any) -> np.ndarray:
        """A field of the staged .npy tables of a group's units, a row a document."""
        paths = [staged(folder, self.names[unit], ending) for unit in self.units(group)]
        return np.concatenate([np.array(np.load(path, mmap_mode="r")[field]) for path in paths])  # closes each file


def layout(names: Sequence[str], sources: Sequence[int], documents: Sequence[int],
           bands: int) -> CorpusLayout:
    """Group units of these numbers of documents."""
    borders, held = [0], 0
    for unit, own in enumerate(documents):
        if unit > borders[-1] and (unit - borders[-1] == GROUP_UNITS or held + own > GROUP_DOCUMENTS):
            borders.append(unit)
            held = 0
        held += own
    starts = np.cumsum([0, *documents], dtype=np.int64).tolist()
    partitions = 1 << (ceil(max(1, starts[-1]) / PARTITION_ROWS) - 1).bit_length()
    return CorpusLayout(list(names), list(sources), starts, [*borders, len(documents)], partitions, bands)


class StagedDocuments:
    """Staged documents by their numbers."""

    def __init__(self, folder: Path, plan: CorpusLayout) -> None:
        self.folder, self.names, self.starts = folder, plan.names, np.array(plan.starts)
        self._index = lru_cache(_UNITS_AT_ONCE)(lambda name: np.load(staged(folder, name, ".npy"), mmap_mode="r"))
        self._texts = lru_cache(_UNITS_AT_ONCE)(lambda name: opened(staged(folder, name, ".documents")))

    def row(self, number: int) -> tuple[str, Any]:
        """The name of a document's unit, and its row of INDEX."""
        unit = int(np.searchsorted(self.starts, number, "right")) - 1
        return self.names[unit], self._index(self.names[unit])[number - self.starts[unit]]

    def document(self, number: int) -> Document:
        """The document, with its text."""
        return self._read(*self.row(number))

    def named(self, number: int) -> tuple[str, str, str, tuple[int, int]]:
        """The document's id, its source, its `url` and the digest of its text."""
        unit, row = self.row(number)
        document = self._read(unit, row)
        url = str(document.meta.get("url") or "")
        return document.id, document.source, url, (int(row["high"]), int(row["low"]))

    def _read(self, unit: str, row: Any) -> Document:
        file = self._texts(unit)
        file.seek(int(row["offset"]))
        return from_json(file.read(int(row["length"])), "")


NONE = 0
"""In every band of a text without a signature."""
DIGEST = 0
"""The column of digests; the columns after it are bands, and the one after these is of `comparing`."""
DIGEST_RUN = np.dtype([("key", "<u8"), ("low", "<u8"), ("place", "<u4")])
RUN = np.dtype([("key", "<u8"), ("place", "<u4")])
"""A key (a digest is two numbers) and the place in the group of the first document that has it."""
LINK = np.dtype([("other", "<u8"), ("kept", "<u8")])
"""Numbers of a document and of the first that has an equal key."""


def _path(folder: Path, kind: str, column: int, name: str) -> Path:
    return folder / STAGING / kind / f"{column:03d}" / name


class GroupTask(TypedDict):
    """A group, by its number."""

    group: int


class PartitionTask(TypedDict):
    """A partition of a column."""

    column: int
    partition: int


def with_records(folder: Path, paths: Iterable[Path]) -> dict[str, Outputs]:
    """What a task returns that wrote these files."""
    return {"outputs": [output_record(folder, path) for path in paths]}


def sort_group(folder: Path, task: GroupTask) -> dict[str, Outputs]:
    """Write the runs of one group, and the links inside of it. Returns the files as `outputs`."""
    plan, group = CorpusLayout.read(folder), task["group"]
    begin, end = plan.bounds(group)
    places, paths = np.arange(end - begin), list[Path]()
    for column in range(plan.bands + 1):
        if column == DIGEST:
            own, keys = places, [plan.column(folder, group, ".npy", half) for half in ("high", "low")]
        else:
            band = plan.column(folder, group, ".bands", (slice(None), column - 1))
            own = places[band[places] != NONE]
            keys = [band[own]]
        firsts, others, kept = equal_rows(keys)
        if column == DIGEST:
            places = np.sort(firsts)
        paths += [write_run(folder, plan, group, column, (key[firsts] for key in keys), own[firsts]),
                  write_links(folder, plan, column, plan.group_names[group], own[others] + begin, own[kept] + begin)]
    return with_records(folder, paths)


def match_partition(folder: Path, task: PartitionTask) -> dict[str, Outputs]:
    """Write the links between groups in one partition of a column. Returns the file as `outputs`."""
    plan, column, partition = CorpusLayout.read(folder), task["column"], task["partition"]
    numbers, rows = read_runs(folder, plan, column, partition)
    _, others, kept = equal_rows([rows[name] for name in rows.dtype.names or () if name != "place"])
    return with_records(folder, [write_links(folder, plan, column, plan.partition_names[partition], numbers[others],
                                             numbers[kept])])


def equal_rows(keys: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Places of rows with equal keys: the first row of each key, sorted by key; each other row; and, for each of
    these, the first row of its key."""
    order = by_key(keys)
    new = np.arange(len(order)) == 0
    for key in keys:
        ordered = key[order]
        new[1:] |= ordered[1:] != ordered[:-1]
    firsts = order[new]
    return firsts, order[~new], firsts[np.cumsum(new)[~new] - 1]


def by_key(keys: Sequence[np.ndarray]) -> np.ndarray:
    """The order of keys; equal ones stay in their order."""
    return np.lexsort(keys[::-1])


def write_run(folder: Path, plan: CorpusLayout, group: int, column: int, keys: Iterable[np.ndarray],
              places: np.ndarray) -> Path:
    """Write rows sorted by key, which is cut into partitions of equal ranges. Returns the file."""
    rows = np.empty(len(places), DIGEST_RUN if column == DIGEST else RUN)
    for name, values in zip(rows.dtype.names or (), (*keys, places), strict=True):
        rows[name] = values
    borders = np.array([number * (2**64 // plan.partitions) for number in range(1, plan.partitions)], np.uint64)
    return write_rows(_path(folder, "runs", column, plan.group_names[group]), rows,
                      np.concatenate([[0], np.searchsorted(rows["key"], borders), [len(rows)]]))


def read_runs(folder: Path, plan: CorpusLayout, column: int, partition: int) -> tuple[np.ndarray, np.ndarray]:
    """The numbers of documents of one partition of a column in all groups, ascending, and their rows."""
    parts = [read_rows(_path(folder, "runs", column, name), DIGEST_RUN if column == DIGEST else RUN, partition,
                       plan.partitions) for name in plan.group_names]
    rows = np.concatenate(parts)
    return np.repeat(plan.group_starts[:-1], [len(part) for part in parts]) + rows["place"], rows


def write_links(folder: Path, plan: CorpusLayout, column: int, name: str, others: np.ndarray,
                kept: np.ndarray) -> Path:
    """Write links, sorted by document, cut into groups. Returns the file."""
    rows, order = np.empty(len(others), LINK), np.argsort(others)
    rows["other"], rows["kept"] = others[order], kept[order]
    return write_rows(links_path(folder, column, name), rows, np.searchsorted(rows["other"], plan.group_starts))


def read_links(folder: Path, plan: CorpusLayout, column: int, names: Sequence[str], group: int) -> np.ndarray:
    """The links of the documents of a group that the units of these names (groups, partitions) found in a column."""
    return np.concatenate([read_rows(links_path(folder, column, name), LINK, group, len(plan.groups) - 1)
                           for name in names])


def links_path(folder: Path, column: int, name: str) -> Path:
    """The file of the links that a unit found in a column: a group inside of itself, a partition between groups."""
    return _path(folder, "links", column, name)


def write_rows(path: Path, rows: np.ndarray, offsets: np.ndarray) -> Path:
    """Write the number of rows before each part and before the end, then the rows."""
    with atomic_file(path) as file:
        file.write(offsets.astype("<u8").tobytes())
        file.write(rows.data)
    return path


def read_rows(path: Path, dtype: np.dtype, part: int, parts: int) -> np.ndarray:
    """The rows of one part.

    Raises:
        UserError: the file is truncated.
    """
    with open(path, "rb") as file:
        file.seek(8 * part)
        bounds = np.frombuffer(file.read(16), "<u8")
        if len(bounds) == 2:
            file.seek(8 * (parts + 1) + int(bounds[0]) * dtype.itemsize)
            rows = np.fromfile(file, dtype, int(bounds[1] - bounds[0]))
            if len(rows) == bounds[1] - bounds[0]:
                return rows
    raise UserError(f"{path} ends before its part {part} of {parts}. Delete it and run the stage again: it makes the "
                    f"file again. Check the disk if this happens twice.")


def sums_of(rows: np.ndarray) -> list[int]:
    """SUMS of rows of INDEX."""
    return [len(rows), *(int(rows[name].sum()) for name in SUMS[1:])]
