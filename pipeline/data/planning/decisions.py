"""What becomes of every document: a unit is a group, decided by the links of its documents.

With `heldout_rule: tail` the split is not decided here: all that stay count as trained on until the plan knows where
the border falls.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Any

import numpy as np

from drover.pipeline.data.planning.comparing import near_column
from drover.pipeline.data.planning.components import read_labels
from drover.pipeline.data.planning.layout import Layout, StagedDocuments
from drover.pipeline.data.planning.runs import DIGEST, read_links
from drover.pipeline.data.reading import HAS_NUL, HAS_U2581, staged
from drover.pipeline.data.text_shards import SPLITS
from drover.pipeline.files import atomic_file, output_record

TRAIN, HELDOUT, DUPLICATE, NEAR_DUPLICATE = range(4)
FATES = (*SPLITS, "duplicate", "near_duplicate")
"""What becomes of a document: a byte each in the staged file `.fates` of its unit, a .npy."""
SUMS = ("documents", "text_bytes", "characters", "nul", "u2581")
"""What is added up over documents: how many, UTF-8 bytes, characters, how many hold a NUL and a U+2581."""
DUPLICATES = "duplicates"
"""Folder of the outputs that name, for each document that was dropped, the one that was kept; and their split."""
_ROWS_AT_ONCE = 20_000


@dataclass(frozen=True)
class Summary:
    """What all groups' decisions add up to.

    Attributes:
        sums: (units, 2 splits, SUMS) of what is kept.
        dropped: (units, 2) exact and near-duplicates.
    """

    sums: np.ndarray
    dropped: np.ndarray


def heldout_below(share: float) -> int:
    """The high half of a digest is held out below this: share * 2^64, which is exact."""
    return ceil(share * 2**64)


def decide_group(folder: Path, payload: dict[str, Any]) -> dict[str, Any]:
    """Write what becomes of each document of a group.

    payload: `group`; `drop` (whether equal documents are dropped); `heldout` (see `heldout_below`; None: not decided
        here); `name_kept` (whether to write which document is kept instead of each that is dropped).

    Returns:
        For each unit a row of `sums` and `dropped` as in `Summary`; the files as `outputs`, that of the
        documents kept instead of others last.
    """
    plan, group = Layout.read(folder), payload["group"]
    begin, end = plan.bounds(group)
    documents = StagedDocuments(folder, plan)
    fates, kept = np.zeros(end - begin, np.uint8), np.arange(begin, end)
    between = read_links(folder, plan, DIGEST, plan.partition_names, group)
    inside = read_links(folder, plan, DIGEST, [plan.group_names[group]], group)
    kept[between["other"] - begin] = between["kept"]
    kept[inside["other"] - begin] = kept[inside["kept"] - begin]
    if payload["drop"]:
        fates[kept != np.arange(begin, end)] = DUPLICATE
    splits_by = {}  # of documents that stay although a component has them: all of it is in one split
    if plan.bands:
        links = read_links(folder, plan, near_column(plan), plan.partition_names, group)
        near = (links["other"] - begin).astype(np.int64)
        fates[near[fates[near] == TRAIN]] = NEAR_DUPLICATE
        kept[near] = links["kept"]
        kept[inside["other"] - begin] = kept[inside["kept"] - begin]
        labels = read_labels(folder, plan, group)
        stay = np.flatnonzero((labels != np.arange(begin, end)) & (fates == TRAIN))
        splits_by = {place: documents.row(first)[1]["high"] for place, first in
                     zip(stay.tolist(), labels[stay].tolist(), strict=True)}
    record: dict[str, Any] = {"sums": [], "dropped": [], "outputs": []}
    for unit in plan.units(group):
        path = staged(folder, plan.names[unit], ".npy")
        index, first = np.load(path), plan.starts[unit] - begin
        own = fates[first:first + len(index)]
        if payload["heldout"] is not None:
            high = index["high"]
            for place in splits_by.keys() & range(first, first + len(index)):
                high[place - first] = splits_by[place]
            own[(own == TRAIN) & (high < np.uint64(payload["heldout"]))] = HELDOUT
        splits = [index[own == fate] for fate in (TRAIN, HELDOUT)]
        record["sums"].append([sums(rows) for rows in splits])
        record["dropped"].append([int((own == fate).sum()) for fate in (DUPLICATE, NEAR_DUPLICATE)])
        with atomic_file(path := staged(folder, plan.names[unit], ".fates")) as file:
            np.save(file, own)
        record["outputs"].append(output_record(folder, path))
    if payload["name_kept"]:
        dropped = np.flatnonzero(fates >= DUPLICATE)
        record["outputs"].append(_write_kept(documents, plan.group_names[group], dropped + begin, kept[dropped],
                                             [FATES[fate] for fate in fates[dropped]]))
    return record


def sums(rows: np.ndarray) -> list[int]:
    """SUMS of rows of INDEX."""
    return [len(rows), int(rows["text_bytes"].sum()), int(rows["characters"].sum()),
            *(int((rows["flags"] & flag > 0).sum()) for flag in (HAS_NUL, HAS_U2581))]


def summary(records: list[dict[str, Any]]) -> Summary:
    """What the records of all groups say, in order."""
    def joined(name: str, *shape: int) -> np.ndarray:
        return np.array([row for record in records for row in record[name]], np.int64).reshape(-1, *shape)
    return Summary(joined("sums", 2, len(SUMS)), joined("dropped", 2))


def _write_kept(documents: StagedDocuments, name: str, numbers: np.ndarray, kept: np.ndarray,
                kinds: list[str]) -> dict[str, Any]:
    """Write, for each dropped document, its id and source, those of the one that is kept, why it was dropped, and
    whether both texts are equal; in order, as Parquet. Returns the output's record."""
    import pyarrow as pa
    from pyarrow import parquet
    schema = pa.schema([*((column, pa.string()) for column in ("id", "source", "kept_id", "kept_source", "kind")),
                        ("equal", pa.bool_())])
    path = documents.folder / DUPLICATES / f"{name}.parquet"
    with atomic_file(path) as file, parquet.ParquetWriter(file, schema) as writer:
        for start in range(0, len(numbers), _ROWS_AT_ONCE):
            pairs = np.stack([numbers, kept], 1)[start:start + _ROWS_AT_ONCE]
            named = {number: documents.named(number) for number in np.unique(pairs).tolist()}
            rows = []
            for (number, other), kind in zip(pairs.tolist(), kinds[start:], strict=False):
                (own_id, own_source, text), (kept_id, kept_source, kept_text) = named[number], named[other]
                rows.append({"id": own_id, "source": own_source, "kept_id": kept_id, "kept_source": kept_source,
                             "kind": kind, "equal": text == kept_text})
            writer.write_table(pa.Table.from_pylist(rows, schema))
    return output_record(documents.folder, path, split=DUPLICATES, source="", docs=len(numbers), text_bytes=0)
