"""The end of each source as its held-out split (`heldout_rule: tail`), exact to the character."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

import numpy as np

from drover.pipeline.data.planning.decisions import SUMS, TRAIN, Summary, sums
from drover.pipeline.data.planning.layout import Layout
from drover.pipeline.data.planning.shards import Piece, Pieces, picked, whole_unit
from drover.pipeline.data.text_shards import SPLITS

_CHARACTERS = SUMS.index("characters")


@dataclass(frozen=True)
class Border:
    """Where a source's held-out split begins: in document `row` of `unit`, after so many of its characters.

    characters: 0: the border falls before the document.
    """

    source: int
    unit: int
    row: int
    characters: int


def find_borders(folder: Path, plan: Layout, summary: Summary, heldout_share: float) -> list[Border]:
    """The border of each source that keeps a document.

    Of a source's n characters that are kept, the first int(n * (1 - share)) stay in the training split.
    """
    trained, sources = 1 - Fraction(str(heldout_share)), np.array(plan.sources)  # as written: 1 - 0.9 is below 0.1
    found = []
    for source in np.unique(sources):
        units = np.flatnonzero(sources == source)
        ends = np.cumsum(summary.sums[units, TRAIN, _CHARACTERS])
        if not ends[-1]:
            continue
        border = int(int(ends[-1]) * trained)
        place = int(np.searchsorted(ends, border, side="right"))
        unit, before = int(units[place]), int(ends[place - 1]) if place else 0
        rows, index = picked(folder, plan.names[unit], 0, plan.starts[unit + 1] - plan.starts[unit], None, TRAIN)
        inside = before + np.cumsum(index["characters"]).astype(np.int64)
        first = int(np.searchsorted(inside, border, side="right"))
        before = int(inside[first - 1]) if first else before
        found.append(Border(int(source), unit, int(rows[first]), border - before))
    return found


def pieces_by_tail(folder: Path, plan: Layout, summary: Summary, borders: list[Border],
                   sources: int) -> list[list[Pieces]]:
    """What makes each split, in the order of documents; for each split and source."""
    of_source = {border.source: border for border in borders}
    found = [[Pieces(TRAIN, []) for _ in range(sources)] for _ in SPLITS]
    for unit, source in enumerate(plan.sources):
        if (border := of_source.get(source)) is None:
            continue
        train, heldout = (of_sources[source].pieces for of_sources in found)
        if unit != border.unit:
            (train if unit < border.unit else heldout).append(whole_unit(plan, summary, unit, TRAIN))
            continue
        end, at = plan.starts[unit + 1] - plan.starts[unit], border.characters
        train.append(_piece(folder, plan.names[unit], 0, border.row + bool(at), [border.row, 0, at] if at else None))
        heldout.append(_piece(folder, plan.names[unit], border.row, end, [border.row, at, None] if at else None))
    return found


def _piece(folder: Path, unit: str, first: int, end: int, cut: list[int | None] | None) -> Piece:
    _, index = picked(folder, unit, first, end, cut, TRAIN)
    return Piece(unit, first, end, sums(index), cut)
