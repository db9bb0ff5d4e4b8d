"""Documents with equal keys, found in two passes: sort the keys of each group, then match each partition of them.

A document has several keys: column 0 is the digest of its text, the next ones are the bands of its signature. `sort`
writes, for each group and column, a run: one row a key, with the first document that has it, sorted by key and cut into
partitions of equal ranges of keys. `match` reads one partition of the runs of all groups. Both write links: a document,
and the first that has an equal key. So 10^8 copies of a page are a row a group and as many links, never pairs.

A document that has an equal one before it in its group has no bands: it is like that one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from drover.pipeline.data.planning.layout import Layout
from drover.pipeline.data.planning.signatures import NONE
from drover.pipeline.data.reading import STAGING
from drover.pipeline.errors import UserError
from drover.pipeline.files import atomic_file, output_record

DIGEST = 0
"""The column of digests; the columns after it are bands, and the one after these is of `comparing`."""
DIGEST_RUN = np.dtype([("key", "<u8"), ("low", "<u8"), ("place", "<u4")])
RUN = np.dtype([("key", "<u8"), ("place", "<u4")])
"""A key (a digest is two numbers) and the place in the group of the first document that has it."""
LINK = np.dtype([("other", "<u8"), ("kept", "<u8")])
"""Numbers of a document and of the first that has an equal key."""


def _path(folder: Path, kind: str, column: int, name: str) -> Path:
    return folder / STAGING / kind / f"{column:03d}" / name


def sort_group(folder: Path, payload: dict[str, Any]) -> dict[str, Any]:
    """Write the runs of one group, and the links inside of it. Returns the files as `outputs`."""
    plan, group = Layout.read(folder), payload["group"]
    begin, end = plan.bounds(group)
    places, outputs = np.arange(end - begin), []
    for column in range(plan.bands + 1):
        if column == DIGEST:
            own, keys = places, [plan.column(folder, group, ".npy", half) for half in ("high", "low")]
        else:
            band = plan.column(folder, group, ".bands", (slice(None), column - 1))
            own = places[band[places] != NONE]
            keys = [band[own]]
        firsts, others, kept = equal_rows(keys, plan.last)
        if column == DIGEST:
            places = np.sort(firsts)
        outputs += [write_run(folder, plan, group, column, (key[firsts] for key in keys), own[firsts]),
                    write_links(folder, plan, column, plan.group_names[group], own[others] + begin, own[kept] + begin)]
    return {"outputs": outputs}


def match_partition(folder: Path, payload: dict[str, Any]) -> dict[str, Any]:
    """Write the links between groups in one partition of a column. Returns the file as `outputs`."""
    plan, column, partition = Layout.read(folder), payload["column"], payload["partition"]
    numbers, rows = read_runs(folder, plan, column, partition)
    _, others, kept = equal_rows([rows[name] for name in rows.dtype.names or () if name != "place"], plan.last)
    return {"outputs": [write_links(folder, plan, column, plan.partition_names[partition], numbers[others],
                                    numbers[kept])]}


def equal_rows(keys: Sequence[np.ndarray], last: bool = False) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Places of rows with equal keys: the first row of each key, sorted by key; each other row; and, for each of
    these, the first row of its key."""
    order = by_key(keys, last)
    new = np.arange(len(order)) == 0
    for key in keys:
        ordered = key[order]
        new[1:] |= ordered[1:] != ordered[:-1]
    firsts = order[new]
    return firsts, order[~new], firsts[np.cumsum(new)[~new] - 1]


def by_key(keys: Sequence[np.ndarray], last: bool = False) -> np.ndarray:
    """The order of keys; equal ones stay in their order, or with `last` are turned round."""
    if last:
        return len(keys[0]) - 1 - by_key([key[::-1] for key in keys])
    order = np.argsort(keys[0], kind="stable")
    first = keys[0][order]
    if any(((first[1:] == first[:-1]) & (key[order[1:]] < key[order[:-1]])).any() for key in keys[1:]):
        order = np.lexsort(keys[::-1])  # three times as slow; two digests hardly ever agree in a half
    return order


def write_run(folder: Path, plan: Layout, group: int, column: int, keys: Iterable[np.ndarray],
              places: np.ndarray) -> dict[str, Any]:
    """Write rows sorted by key, which is cut into partitions of equal ranges. Returns the output's record."""
    rows = np.empty(len(places), DIGEST_RUN if column == DIGEST else RUN)
    for name, values in zip(rows.dtype.names or (), (*keys, places), strict=True):
        rows[name] = values
    borders = np.array([number * (2**64 // plan.partitions) for number in range(1, plan.partitions)], np.uint64)
    return write_rows(folder, _path(folder, "runs", column, plan.group_names[group]), rows,
                      np.concatenate([[0], np.searchsorted(rows["key"], borders), [len(rows)]]))


def read_runs(folder: Path, plan: Layout, column: int, partition: int) -> tuple[np.ndarray, np.ndarray]:
    """The numbers of documents of one partition of a column in all groups, ascending, and their rows."""
    parts = [read_rows(_path(folder, "runs", column, name), DIGEST_RUN if column == DIGEST else RUN, partition,
                       plan.partitions) for name in plan.group_names]
    rows = np.concatenate(parts)
    return np.repeat(plan.group_starts[:-1], [len(part) for part in parts]) + rows["place"], rows


def write_links(folder: Path, plan: Layout, column: int, name: str, others: np.ndarray,
                kept: np.ndarray) -> dict[str, Any]:
    """Write links, sorted by document, cut into groups. Returns the output's record."""
    rows, order = np.empty(len(others), LINK), np.argsort(others)
    rows["other"], rows["kept"] = others[order], kept[order]
    return write_rows(folder, links_path(folder, column, name), rows,
                      np.searchsorted(rows["other"], plan.group_starts))


def read_links(folder: Path, plan: Layout, column: int, names: Sequence[str], group: int) -> np.ndarray:
    """The links of the documents of a group that the units of these names (groups, partitions) found in a column."""
    return np.concatenate([read_rows(links_path(folder, column, name), LINK, group, len(plan.groups) - 1)
                           for name in names])


def links_path(folder: Path, column: int, name: str) -> Path:
    """The file of the links that a unit found in a column: a group inside of itself, a partition between groups."""
    return _path(folder, "links", column, name)


def write_rows(folder: Path, path: Path, rows: np.ndarray, offsets: np.ndarray) -> dict[str, Any]:
    """Write the number of rows before each part and before the end, then the rows."""
    with atomic_file(path) as file:
        file.write(offsets.astype("<u8").tobytes())
        file.write(rows.data)
    return output_record(folder, path)


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
