"""What becomes of every document: a unit is a group, decided by its digests and what other groups have of them.

With `heldout_rule: tail` the split is not decided here: all that are kept count as trained on until the plan knows
where the border falls.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.data.planning.matches import read_matches
from pipeline.data.planning.runs import Layout, equals_path, group_name
from pipeline.data.staging import HAS_NUL, HAS_U2581, SPLITS, STAGING, staged
from pipeline.files import atomic_file, output_record

DECISION = np.dtype([("fate", "u1"), ("copy", "<u4")])
"""What becomes of a document, and how many equal ones are before it."""
TRAIN, HELDOUT, DUPLICATE, NEAR_DUPLICATE = range(4)
FATES = (*SPLITS, "duplicate", "near_duplicate")
SUMS = ("documents", "text_bytes", "characters", "nul", "u2581")
"""What is added up over documents: how many, UTF-8 bytes, characters, how many hold a NUL and a U+2581."""
LARGE = 0.49
"""Share of a shard's bytes from which on a document is listed: only such a one can leave a gap in their numbers."""


@dataclass(frozen=True)
class Summary:
    """What all groups' decisions add up to.

    Attributes:
        sums: (units, 2 splits, SUMS) of what is kept.
        dropped: (units, 2) exact and near-duplicates.
        large: (unit, split, bytes before it in that unit and split, bytes) of each large document, in order.
    """

    sums: np.ndarray
    dropped: np.ndarray
    large: list[tuple[int, int, int, int]]


def decisions_path(folder: Path, name: str) -> Path:
    """Rows of DECISION of the documents of the group (or `cut`) of that name."""
    return folder / STAGING / "decisions" / f"{name}.npy"


def decide_payload(layout: Layout, group: int, settings: dict[str, Any], matches: str) -> dict[str, Any]:
    """What `decide_group` needs.

    Args:
        settings: `drop`, `heldout` (see `heldout_below`; None: not decided here) and `target` (bytes of a shard).
        matches: a hash of all runs and matches.
    """
    units = layout.units(group)
    return {"group": group, "groups": len(layout.groups) - 1, "partitions": layout.partitions, "keep": layout.keep,
            "units": [layout.names[unit] for unit in units],
            "starts": [int(layout.starts[unit]) for unit in (*units, units.stop)], "matches": matches, **settings}


def heldout_below(share: float) -> int:
    """The high half of a digest is held out below this: share * 2^64, which is exact."""
    return ceil(share * 2**64)


def decide_group(folder: Path, payload: dict[str, Any]) -> dict[str, Any]:
    """Write what becomes of each document of a group.

    Returns:
        For each unit `sums`, `dropped` and `large` as in `Summary`, without the unit's number; the file as `outputs`.
    """
    starts = [start - payload["starts"][0] for start in payload["starts"]]
    decisions = np.zeros(starts[-1], DECISION)
    decisions["copy"] = copies(folder, payload, starts[-1])
    if payload["drop"]:
        decisions["fate"][decisions["copy"] > 0] = DUPLICATE
    path = decisions_path(folder, group_name(payload["group"]))
    record: dict[str, Any] = {"sums": [], "dropped": [], "large": []}
    for unit, start, end in zip(payload["units"], starts, starts[1:], strict=False):
        index, own = np.load(staged(folder, unit, ".npy")), decisions[start:end]
        if payload["heldout"] is not None:
            own["fate"][(own["fate"] == TRAIN) & (index["high"] < np.uint64(payload["heldout"]))] = HELDOUT
        splits = [index[own["fate"] == fate] for fate in (TRAIN, HELDOUT)]
        record["sums"].append([sums(rows) for rows in splits])
        record["dropped"].append([int((own["fate"] == fate).sum()) for fate in (DUPLICATE, NEAR_DUPLICATE)])
        record["large"].append([[split, *place] for split, rows in enumerate(splits)
                                for place in large(rows["text_bytes"], payload["target"])])
    with atomic_file(path) as file:
        np.save(file, decisions)
    return {**record, "outputs": [output_record(folder, path)]}


def copies(folder: Path, payload: dict[str, Any], documents: int) -> np.ndarray:
    """For each document of a group, how many equal ones are before it in the corpus."""
    equal = np.load(equals_path(folder, payload["group"]))
    matches = read_matches(folder, payload["group"], payload["groups"], payload["partitions"])
    copy = np.zeros(documents, np.uint32)
    copy[matches["place"]] = matches["copy"]
    copy[equal["place"]] = copy[equal["first"]] + equal["copy"]
    return copy


def sums(rows: np.ndarray) -> list[int]:
    """SUMS of rows of INDEX."""
    return [len(rows), int(rows["text_bytes"].sum()), int(rows["characters"].sum()),
            *(int((rows["flags"] & flag > 0).sum()) for flag in (HAS_NUL, HAS_U2581))]


def large(sizes: np.ndarray, target: float) -> list[list[int]]:
    """(bytes before it, bytes) of each document that may leave a gap between shards of `target` bytes."""
    before = np.cumsum(sizes) - sizes
    return [[int(before[row]), int(sizes[row])] for row in np.flatnonzero(sizes >= LARGE * target)]


def summary(records: list[dict[str, Any]]) -> Summary:
    """What the records of all groups say, in order."""
    units = [unit for record in records for unit in zip(record["sums"], record["dropped"], record["large"],
                                                        strict=True)]
    return Summary(np.array([own for own, _, _ in units], np.int64).reshape(-1, 2, len(SUMS)),
                   np.array([dropped for _, dropped, _ in units], np.int64).reshape(-1, 2),
                   [(unit, *place) for unit, (_, _, places) in enumerate(units) for place in places])
