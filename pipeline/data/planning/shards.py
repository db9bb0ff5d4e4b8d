"""The plan of shards, computed from sums over units, and the writing of one.

With `validation_rule: tail` the end of each source is its validation split, exact to the character.
"""

from __future__ import annotations

import struct
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import pairwise
from math import ceil
from pathlib import Path
from typing import Any

import numpy as np

from drover.pipeline.core.errors import UserError
from drover.pipeline.core.files import output_record
from drover.pipeline.data.documents import document_key, from_json, key_fits, to_json
from drover.pipeline.data.planning.runs import SUMS, TRAIN, Layout, Summary, equal_rows, read_document, sums
from drover.pipeline.data.reading import INDEX, index_row, staged
from drover.pipeline.data.text_shards import SPLITS, write_members

_BYTES = SUMS.index("text_bytes")


@dataclass(frozen=True)
class Piece:
    """A range of a unit's documents, of which those with one fate belong to one split.

    Attributes:
        unit: its name.
        first, end: the first row and the one after the last.
        cut: [row, first character, the one after the last or None] of a document of which only a part belongs here.
        sums: SUMS over them.
    """

    unit: str
    first: int
    end: int
    sums: Sequence[int]
    cut: Sequence[int | None] | None = None


@dataclass(frozen=True)
class Pieces:
    """The pieces of one split of one source, in order.

    fate: the fate of documents that belong to it.
    """

    fate: int
    pieces: list[Piece]

    def total(self, what: str) -> int:
        """One of SUMS over all pieces."""
        return sum(piece.sums[SUMS.index(what)] for piece in self.pieces)


def pieces_by_hash(plan: Layout, summary: Summary, sources: int) -> list[list[Pieces]]:
    """The pieces of each split and source, by the fates of documents."""
    result = [[Pieces(split, []) for _ in range(sources)] for split in range(len(SPLITS))]
    for unit, source in enumerate(plan.sources):
        for split, of_sources in enumerate(result):
            of_sources[source].pieces.append(whole_unit(plan, summary, unit, split))
    return result


def whole_unit(plan: Layout, summary: Summary, unit: int, fate: int) -> Piece:
    """All documents of a unit with a fate."""
    return Piece(plan.names[unit], 0, plan.documents(unit), summary.sums[unit, fate].tolist())


def plan_shards(pieces: list[list[Pieces]], target: float, sources: list[str]) -> list[dict[str, Any]]:
    """The payloads for `write_shard`, in order: shards of about equal size, as few as keep to `target` on average.

    Args:
        pieces: for each split and source.
        target: bytes of text per shard.
    """
    return [{"split": split, "source": source, "name": f"{source}-{number:05d}", "fate": own.fate, "pieces": chosen}
            for split, of_sources in zip(SPLITS, pieces, strict=True)
            for source, own in zip(sources, of_sources, strict=True)
            for number, chosen in enumerate(_cut(own, target))]


def _cut(pieces: Pieces, target: float) -> Iterator[list[list[Any]]]:
    """For each shard its pieces: unit, first row, the one after the last, the part of a document, and which bytes of
    the piece begin the shard's documents."""
    own = [piece for piece in pieces.pieces if piece.sums[_BYTES]]
    starts = np.cumsum([0, *(piece.sums[_BYTES] for piece in own)]).tolist()
    total, count = starts[-1], ceil(starts[-1] / target)
    for low, high in pairwise(-(-number * total // max(1, count)) for number in range(count + 1)):
        first, end = bisect_right(starts, low) - 1, bisect_left(starts, high)  # of the pieces that reach into the shard
        yield [[piece.unit, piece.first, piece.end, piece.cut, [max(0, low - start), min(after, high) - start]]
               for piece, (start, after) in zip(own[first:end], pairwise(starts[first:end + 1]), strict=True)]


def _before(index: np.ndarray) -> np.ndarray:
    """Bytes of text before each document."""
    return np.cumsum(index["text_bytes"], dtype=np.int64) - index["text_bytes"].astype(np.int64)


def picked(folder: Path, unit: str, first: int, end: int, cut: Sequence[int | None] | None,
           fate: int) -> tuple[np.ndarray, np.ndarray]:
    """The documents with a fate among some rows of a unit: their rows, and what its index has there; for the one that
    is cut, digest and size are those of the part."""
    rows = first + np.flatnonzero(np.load(staged(folder, unit, ".fates"), mmap_mode="r")[first:end] == fate)
    index = np.array(np.load(staged(folder, unit, ".npy"), mmap_mode="r")[rows])
    if cut is not None:
        [place] = np.flatnonzero(rows == cut[0])
        text = read_document(folder, unit, index[place]).text[cut[1]:cut[2]]
        [index[place]] = np.frombuffer(index_row(text, int(index[place]["offset"]), int(index[place]["length"])), INDEX)
    return rows, index


def write_shard(folder: Path, payload: dict[str, Any]) -> dict[str, Any]:
    """Write one shard; its record as `outputs`. If documents are larger than half a shard, no document may begin in
    this one: then it is not written.

    Raises:
        UserError: a document is not what was staged, or the shard reads back as other bytes than were written.
    """
    pieces = []
    for unit, first, end, cut, (low, high) in payload["pieces"]:
        rows, index = picked(folder, unit, first, end, cut, payload["fate"])
        before = _before(index)
        own = (before >= low) & (before < high)
        pieces.append((unit, cut, rows[own], index[own]))
    path, picks = folder / payload["split"] / f"{payload['name']}.tar", np.concatenate([index for *_, index in pieces])
    if not len(picks):
        return {"outputs": []}
    written = write_members(path, _checked(path, zip(_keys(picks), _members(folder, pieces), strict=True)))
    record = output_record(folder, path, split=payload["split"], source=payload["source"], docs=len(picks),
                           text_bytes=int(picks["text_bytes"].sum()))
    if record["sha256"] != written:
        raise UserError(f"{path} does not read back as it was written. Check the disk, and run the stage again.")
    return {"outputs": [record]}


def _checked(path: Path, members: Iterable[tuple[str, bytes]]) -> Iterator[tuple[str, bytes]]:
    """The members, if the text of each has the hash that it had when it was staged."""
    for key, member in members:
        document = from_json(member, key)
        if not key_fits(document):
            raise UserError(f"{path} cannot be written: the document {document.id} is not what was staged. Check the "
                            f"disk, and run the stage again.")
        yield key, member


def _keys(picks: np.ndarray) -> Iterator[str]:
    """Names of documents in their shard; equal ones are numbered."""
    _, others, firsts = equal_rows([picks["high"], picks["low"]])
    first_of, before = dict(zip(others.tolist(), firsts.tolist(), strict=True)), Counter[int]()
    for place, (high, low) in enumerate(zip(picks["high"], picks["low"], strict=True)):
        if (first := first_of.get(place)) is not None:
            before[first] += 1
        yield document_key(struct.pack(">QQ", high, low), 0 if first is None else before[first])


def _members(folder: Path, pieces: list[tuple[str, Any, np.ndarray, np.ndarray]]) -> Iterator[bytes]:
    """The JSON of the documents."""
    for unit, cut, rows, index in pieces:
        with open(staged(folder, unit, ".documents"), "rb") as file:
            for row, offset, length in zip(rows, index["offset"].tolist(), index["length"].tolist(), strict=True):
                file.seek(offset)
                member = file.read(length)
                if cut is not None and cut[0] == row:
                    whole, part = from_json(member, ""), f"[{cut[1] or ''}:{cut[2] or ''}]"
                    member = to_json(replace(whole, text=whole.text[cut[1]:cut[2]], id=whole.id + part,
                                             place=whole.place and whole.place + part))
                yield member


_CHARACTERS = SUMS.index("characters")


@dataclass(frozen=True)
class Border:
    """Where a source's validation split begins: in document `row` of `unit`, after so many of its characters.

    characters: 0: the border falls before the document.
    """

    source: int
    unit: int
    row: int
    characters: int


def find_borders(folder: Path, plan: Layout, summary: Summary, validation_share: float) -> list[Border]:
    """The border of each source that keeps a document.

    Of a source's n characters that are kept, the first int(n * (1 - share)) stay in the training split.
    """
    trained, sources = 1 - Fraction(str(validation_share)), np.array(plan.sources)  # as written: 1 - 0.9 is below 0.1
    result = []
    for source in np.unique(sources):
        units = np.flatnonzero(sources == source)
        ends = np.cumsum(summary.sums[units, TRAIN, _CHARACTERS])
        if not ends[-1]:
            continue
        border = int(int(ends[-1]) * trained)
        place = int(np.searchsorted(ends, border, side="right"))
        unit, before = int(units[place]), int(ends[place - 1]) if place else 0
        rows, index = picked(folder, plan.names[unit], 0, plan.documents(unit), None, TRAIN)
        inside = before + np.cumsum(index["characters"]).astype(np.int64)
        first = int(np.searchsorted(inside, border, side="right"))
        before = int(inside[first - 1]) if first else before
        result.append(Border(int(source), unit, int(rows[first]), border - before))
    return result


def pieces_by_tail(folder: Path, plan: Layout, summary: Summary, borders: list[Border],
                   sources: int) -> list[list[Pieces]]:
    """The pieces of each split and source, in the order of documents."""
    of_source = {border.source: border for border in borders}
    result = [[Pieces(TRAIN, []) for _ in range(sources)] for _ in SPLITS]
    for unit, source in enumerate(plan.sources):
        if (border := of_source.get(source)) is None:
            continue
        train, validation = (of_sources[source].pieces for of_sources in result)
        if unit != border.unit:
            (train if unit < border.unit else validation).append(whole_unit(plan, summary, unit, TRAIN))
            continue
        end, at = plan.documents(unit), border.characters
        train.append(_piece(folder, plan.names[unit], 0, border.row + bool(at), [border.row, 0, at] if at else None))
        validation.append(_piece(folder, plan.names[unit], border.row, end, [border.row, at, None] if at else None))
    return result


def _piece(folder: Path, unit: str, first: int, end: int, cut: list[int | None] | None) -> Piece:
    _, index = picked(folder, unit, first, end, cut, TRAIN)
    return Piece(unit, first, end, sums(index), cut)
