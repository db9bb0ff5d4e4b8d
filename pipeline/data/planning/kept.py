"""The document that is kept of each that is dropped: comparing the two, and naming it."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.data.documents import Document, from_json
from pipeline.data.planning.runs import Layout
from pipeline.data.planning.signatures import words
from pipeline.data.reading import STAGING, staged
from pipeline.files import atomic_file, output_record, read_json, write_json

DUPLICATES = "duplicates"
"""Folder of the outputs that name, for each document that was dropped, the one that was kept; and their split."""
ROWS_AT_ONCE, UNITS_AT_ONCE = 20_000, 32
NGRAM = 3
"""Words of the shingles by which two documents are compared."""


def write_units(folder: Path, layout: Layout) -> None:
    """Write which unit each document is staged in."""
    write_json(folder / STAGING / "units.json", {"names": list(layout.names), "starts": layout.starts.tolist()},
               keep_equal=True)


class StagedDocuments:
    """Staged documents by their numbers."""

    def __init__(self, folder: Path) -> None:
        units = read_json(folder / STAGING / "units.json")
        self.folder, self.names, self.starts = folder, units["names"], np.array(units["starts"])
        self.indexes: OrderedDict[int, np.ndarray] = OrderedDict()

    def row(self, number: int) -> tuple[int, Any]:
        """A document's unit and its row of INDEX."""
        unit = int(np.searchsorted(self.starts, number, "right")) - 1
        if unit not in self.indexes:
            if len(self.indexes) == UNITS_AT_ONCE:
                self.indexes.popitem(last=False)
            self.indexes[unit] = np.load(staged(self.folder, self.names[unit], ".npy"), mmap_mode="r")
        return unit, self.indexes[unit][number - self.starts[unit]]

    def document(self, number: int) -> Document:
        """The document, with its text."""
        unit, row = self.row(number)
        with open(staged(self.folder, self.names[unit], ".documents"), "rb") as file:
            file.seek(int(row["offset"]))
            return from_json(file.read(int(row["length"])), "")


def shingles(text: str, kind: str = "runs") -> set[tuple[str, ...]]:
    """All runs of `NGRAM` words of a text, or its words where they are fewer; kind: see `words`."""
    own = words(text, kind)
    return {tuple(own[place:place + NGRAM]) for place in range(max(1, len(own) - NGRAM + 1))}


def similarity(one: set[tuple[str, ...]], other: set[tuple[str, ...]]) -> float:
    """Jaccard similarity of two sets, of which one holds something."""
    shared = len(one & other)
    return shared / (len(one) + len(other) - shared)


def alike(documents: StagedDocuments, numbers: np.ndarray, kept: np.ndarray, least: float,
          kind: str = "runs") -> np.ndarray:
    """Which documents have a Jaccard similarity of at least `least` with the one that is kept instead of them; kind: of
    words."""
    found, last, of_last = np.zeros(len(numbers), bool), -1, set[tuple[str, ...]]()
    for place in np.argsort(kept, kind="stable"):
        if int(kept[place]) != last:
            last = int(kept[place])
            of_last = shingles(documents.document(last).text, kind)
        own = shingles(documents.document(int(numbers[place])).text, kind)
        found[place] = similarity(own, of_last) >= least
    return found


def write_kept(documents: StagedDocuments, name: str, numbers: np.ndarray, kept: np.ndarray,
               kinds: list[str]) -> dict[str, Any]:
    """Write, for each dropped document, its id and source, those of the one that is kept, and why it was dropped; in
    order, as Parquet. Returns the output's record."""
    import pyarrow as pa
    from pyarrow import parquet
    schema = pa.schema([(column, pa.string()) for column in ("id", "source", "kept_id", "kept_source", "kind")])
    path = documents.folder / DUPLICATES / f"{name}.parquet"
    with atomic_file(path) as file, parquet.ParquetWriter(file, schema) as writer:
        for start in range(0, len(numbers), ROWS_AT_ONCE):
            part = slice(start, start + ROWS_AT_ONCE)
            named = {number: (found.id, found.source) for number in sorted({*numbers[part].tolist(),
                                                                            *kept[part].tolist()})
                     for found in [documents.document(number)]}
            rows = [(*named[number], *named[other], kind) for number, other, kind in
                    zip(numbers[part].tolist(), kept[part].tolist(), kinds[part], strict=True)]
            writer.write_table(pa.table([pa.array(column, pa.string()) for column in zip(*rows, strict=True)],
                                        schema=schema))
    return output_record(documents.folder, path, split=DUPLICATES, source="", docs=len(numbers), text_bytes=0)
