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

from pipeline.data.planning.components import read_labels
from pipeline.data.planning.kept import StagedDocuments, alike, write_kept
from pipeline.data.planning.matches import read_matches
from pipeline.data.planning.runs import Layout, equals_path, group_name
from pipeline.data.reading import HAS_NUL, HAS_U2581, STAGING, staged
from pipeline.data.text_shards import SPLITS
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
        settings: `drop`, `heldout` (see `heldout_below`; None: not decided here), `target` (bytes of a shard), `near`
            (whether there are labels of near-duplicates), `verify` (the least similarity of one that is dropped, or
            None), `words` (what is a word in that; absent: runs), `name_kept` (whether to write which document is kept
            instead of each that is dropped) and then `documents` (a hash of all staged documents).
        matches: a hash of all runs, matches and labels.
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
        For each unit `sums`, `dropped` and `large` as in `Summary`, without the unit's number; the file as `outputs`,
        then that of the documents kept instead of others.
    """
    begin = payload["starts"][0]
    starts = [start - begin for start in payload["starts"]]
    group = Group(folder, payload)
    decisions = np.zeros(starts[-1], DECISION)
    decisions["copy"] = group.copy
    if payload["drop"]:
        decisions["fate"][group.copy > 0] = DUPLICATE
    staying, firsts = group.drop_near(decisions["fate"]) if payload["near"] else (np.empty(0, int), np.empty(0, int))
    record: dict[str, Any] = {"sums": [], "dropped": [], "large": []}
    for unit, start, end in zip(payload["units"], starts, starts[1:], strict=False):
        index, own = np.load(staged(folder, unit, ".npy")), decisions[start:end]
        if payload["heldout"] is not None:
            high, here = index["high"], slice(*np.searchsorted(staying, (start, end)))
            high[staying[here] - start] = firsts[here]
            own["fate"][(own["fate"] == TRAIN) & (high < np.uint64(payload["heldout"]))] = HELDOUT
        splits = [index[own["fate"] == fate] for fate in (TRAIN, HELDOUT)]
        record["sums"].append([sums(rows) for rows in splits])
        record["dropped"].append([int((own["fate"] == fate).sum()) for fate in (DUPLICATE, NEAR_DUPLICATE)])
        record["large"].append([[split, *place] for split, rows in enumerate(splits)
                                for place in large(rows["text_bytes"], payload["target"])])
    path = decisions_path(folder, group_name(payload["group"]))
    with atomic_file(path) as file:
        np.save(file, decisions)
    outputs = [output_record(folder, path)]
    if payload["name_kept"]:
        dropped = np.flatnonzero(decisions["fate"] >= DUPLICATE)
        outputs.append(write_kept(StagedDocuments(folder), group_name(payload["group"]), dropped + begin,
                                  group.kept[dropped], [FATES[fate] for fate in decisions["fate"][dropped]]))
    return {**record, "outputs": outputs}


class Group:
    """The documents of a group and their equals and likes in the corpus.

    Attributes:
        copy: (n,) how many equal ones are before each in the corpus.
        kept: (n,) number of the document that would stay instead of each: the first of its equals or, where that is a
            near-duplicate, the first of its component; its own where there is none before it.
    """

    def __init__(self, folder: Path, payload: dict[str, Any]) -> None:
        self.folder, self.payload, self.begin = folder, payload, payload["starts"][0]
        documents = payload["starts"][-1] - self.begin
        self.equal = np.load(equals_path(folder, payload["group"]))
        matches = read_matches(folder, payload["group"], payload["groups"], payload["partitions"])
        self.copy = np.zeros(documents, np.uint32)
        self.copy[matches["place"]] = matches["copy"]
        self.copy[self.equal["place"]] = self.copy[self.equal["first"]] + self.equal["copy"]
        self.kept = np.arange(self.begin, self.begin + documents)
        self.kept[matches["place"]] = matches["kept"]
        self._follow_equals()

    def _follow_equals(self) -> None:
        self.kept[self.equal["place"]] = self.kept[self.equal["first"]]

    def drop_near(self, fate: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Drop those that are like the first of their component.

        Returns:
            The places of those that stay although a component has them, and for each the high half of the digest of
            its first document, whose split they share.
        """
        labels = read_labels(self.folder, self.payload["group"], self.payload["groups"])
        like, firsts = np.ones(len(labels), bool), np.empty(0, np.uint64)
        if self.payload["verify"] is not None:
            documents = StagedDocuments(self.folder)
            like = alike(documents, labels["place"].astype(np.int64) + self.begin, labels["kept"],
                         self.payload["verify"], self.payload.get("words", "runs"))
            firsts = np.array([documents.row(int(kept))[1]["high"] for kept in labels["kept"][~like]], np.uint64)
        places = labels["place"][like]
        fate[places[fate[places] == TRAIN]] = NEAR_DUPLICATE
        self.kept[places] = labels["kept"][like]
        self._follow_equals()
        return labels["place"][~like].astype(np.int64), firsts


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
