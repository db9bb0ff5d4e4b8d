"""Equal documents of different groups: a unit is a partition of the digests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from pipeline.data.planning.runs import (
    RUN,
    Layout,
    by_digest,
    first_of_equals,
    read_partition,
    run_path,
    write_partitioned,
)
from pipeline.data.reading import STAGING
from pipeline.files import output_record

MATCH = np.dtype([("place", "<u4"), ("copy", "<u4"), ("kept", "<u8")])
"""The first of its equals in a group, of which an earlier group has some: its place in the group, how many are in
earlier groups, and the number of the very first."""


def match_name(partition: int) -> str:
    """Name of a partition's unit."""
    return f"partition-{partition:06d}"


def match_path(folder: Path, partition: int) -> Path:
    """Rows of MATCH by group and place, after the number of rows before each group and their end."""
    return folder / STAGING / "matches" / f"{match_name(partition)}.match"


def match_payload(layout: Layout, partition: int, runs: str) -> dict[str, Any]:
    """What `match_partition` needs; runs: a hash of all runs."""
    return {"partition": partition, "partitions": layout.partitions, "starts": layout.group_starts,
            "keep": layout.keep, "runs": runs}


def match_partition(folder: Path, payload: dict[str, Any]) -> dict[str, Any]:
    """Write which digests of a partition stand in several groups. Returns the file as `outputs`."""
    partition, partitions, starts = payload["partition"], payload["partitions"], payload["starts"]
    parts = [read_partition(run_path(folder, group), RUN, partition, partitions) for group in range(len(starts) - 1)]
    rows = np.concatenate(parts)
    group = np.repeat(np.arange(len(parts), dtype=np.uint32), [len(part) for part in parts])
    del parts
    order = by_digest(rows["high"], rows["low"], payload["keep"] == "last")
    rows, group = rows[order], group[order]
    new = first_of_equals(rows["high"], rows["low"])
    before = np.cumsum(rows["count"], dtype=np.int64) - rows["count"]
    later = np.flatnonzero(~new)
    of = np.flatnonzero(new)[np.cumsum(new)[later] - 1]  # the very first of each one's equals
    found = np.empty(len(later), MATCH)
    found["place"], found["copy"] = rows["first"][later], before[later] - before[of]
    found["kept"] = np.array(starts, np.uint64)[group[of]] + rows["first"][of]
    order = np.lexsort((found["place"], group[later]))
    path = match_path(folder, partition)
    write_partitioned(path, found[order],
                      np.searchsorted(group[later][order], np.arange(len(starts), dtype=np.uint32)))
    return {"matched": len(found), "outputs": [output_record(folder, path)]}


def read_matches(folder: Path, group: int, groups: int, partitions: int) -> np.ndarray:
    """Rows of MATCH of one group, in no order."""
    return np.concatenate([read_partition(match_path(folder, partition), MATCH, group, groups)
                           for partition in range(partitions)])
