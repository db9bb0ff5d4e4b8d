"""The plan of shards, computed from sums over units, and the writing of one.

With `validation_rule: tail` the end of each source is its validation split, exact to the character.
"""

from __future__ import annotations

import struct
from bisect import bisect_left, bisect_right
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
from drover.pipeline.data.planning.runs import SUMS, TRAIN, CorpusLayout, read_document, sums_of
from drover.pipeline.data.reading import INDEX, index_row, staged
from drover.pipeline.data.text_shards import SPLITS, write_members

_BYTES, _CHARACTERS = SUMS.index("text_bytes"), SUMS.index("characters")


@dataclass(frozen=True)
class ShardPiece:
    """A range of a unit's documents, of which those with one outcome belong to one split.

    Attributes:
        unit: its name.
        first, end: the first row and the one after the last.
        outcome: of the documents that belong to the split.
        sums: SUMS over them.
        cut: [row, first character, the one after the last or None] of a document of which only a part belongs here.
    """

    unit: str
    first: int
    end: int
    outcome: int
    sums: Sequence[int]
    cut: Sequence[int | None] | None = None


def pieces_by_hash(plan: CorpusLayout, sums: np.ndarray, sources: int) -> list[list[list[ShardPiece]]]:
    """The pieces of each split and source, by the outcomes of documents.

    sums: (units, 2 splits, SUMS) of what is kept.
    """
    return [[[all_of_unit(plan, sums, unit, split) for unit, owner in enumerate(plan.sources) if owner == source]
             for source in range(sources)] for split in range(len(SPLITS))]


def all_of_unit(plan: CorpusLayout, sums: np.ndarray, unit: int, outcome: int) -> ShardPiece:
    """All documents of a unit with an outcome."""
    return ShardPiece(plan.names[unit], 0, plan.documents(unit), outcome, sums[unit, outcome].tolist())


def plan_shards(pieces: list[list[list[ShardPiece]]], target: float, sources: list[str]) -> list[dict[str, Any]]:
    """The payloads for `write_shard`, in order: shards of about equal size, as few as keep to `target` on average.

    Args:
        pieces: for each split and source.
        target: bytes of text per shard.
    """
    return [{"split": split, "source": source, "name": f"{source}-{number:05d}", "pieces": chosen}
            for split, of_sources in zip(SPLITS, pieces, strict=True)
            for source, own in zip(sources, of_sources, strict=True)
            for number, chosen in enumerate(_cut(own, target))]


def _cut(pieces: list[ShardPiece], target: float) -> Iterator[list[list[Any]]]:
    """For each shard its pieces: unit, first row, the one after the last, the outcome, the part of a document, and
    which bytes of the piece begin the shard's documents."""
    own = [piece for piece in pieces if piece.sums[_BYTES]]
    starts = np.cumsum([0, *(piece.sums[_BYTES] for piece in own)]).tolist()
    total, count = starts[-1], ceil(starts[-1] / target)
    for low, high in pairwise(-(-number * total // max(1, count)) for number in range(count + 1)):
        first, end = bisect_right(starts, low) - 1, bisect_left(starts, high)  # of the pieces that reach into the shard
        yield [[piece.unit, piece.first, piece.end, piece.outcome, piece.cut,
                [max(0, low - start), min(after, high) - start]]
               for piece, (start, after) in zip(own[first:end], pairwise(starts[first:end + 1]), strict=True)]


def picked(folder: Path, unit: str, first: int, end: int, outcome: int,
           cut: Sequence[int | None] | None) -> tuple[np.ndarray, np.ndarray]:
    """The documents with an outcome among some rows of a unit: their rows, and what its index has there; for the one
    that is cut, digest and size are those of the part."""
    rows = first + np.flatnonzero(np.load(staged(folder, unit, ".fates"), mmap_mode="r")[first:end] == outcome)
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
    for unit, first, end, outcome, cut, (low, high) in payload["pieces"]:
        rows, index = picked(folder, unit, first, end, outcome, cut)
        before = np.cumsum(index["text_bytes"], dtype=np.int64) - index["text_bytes"].astype(np.int64)
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
    seen: dict[bytes, int] = {}
    for high, low in zip(picks["high"].tolist(), picks["low"].tolist(), strict=True):
        digest = struct.pack(">QQ", high, low)
        before = seen.get(digest, 0)
        yield document_key(digest, before)
        seen[digest] = before + 1


def _members(folder: Path, pieces: list[tuple[str, Any, np.ndarray, np.ndarray]]) -> Iterator[bytes]:
    """The JSON of the documents."""
    for unit, cut, rows, index in pieces:
        with open(staged(folder, unit, ".documents"), "rb") as file:
            for row, offset, length in zip(rows, index["offset"].tolist(), index["length"].tolist(), strict=True):
                file.seek(offset)
                member = file.read(length)
                if cut is not None and cut[0] == row:
                    complete, part = from_json(member, ""), f"[{cut[1] or ''}:{cut[2] or ''}]"
                    member = to_json(replace(complete, text=complete.text[cut[1]:cut[2]], id=complete.id + part,
                                             place=complete.place and complete.place + part))
                yield member


def pieces_by_tail(folder: Path, plan: CorpusLayout, sums: np.ndarray, validation_share: float,
                   sources: int) -> list[list[list[ShardPiece]]]:
    """The pieces of each split and source, in the order of documents: of a source's n characters that are kept, the
    first int(n * (1 - share)) stay in the training split. No pieces for a source that keeps nothing."""
    trained = 1 - Fraction(str(validation_share))  # as written: 1 - 0.9 is below 0.1
    train, validation = ([list[ShardPiece]() for _ in range(sources)] for _ in SPLITS)
    for source in range(sources):
        units = np.flatnonzero(np.array(plan.sources) == source).tolist()
        ends = np.cumsum(sums[units, TRAIN, _CHARACTERS])
        if not len(ends) or not ends[-1]:
            continue
        border = int(int(ends[-1]) * trained)
        at = int(np.searchsorted(ends, border, side="right"))
        unit, before = units[at], int(ends[at - 1]) if at else 0
        name, end = plan.names[unit], plan.documents(unit)
        rows, index = picked(folder, name, 0, end, TRAIN, None)
        inside = before + np.cumsum(index["characters"]).astype(np.int64)
        first = int(np.searchsorted(inside, border, side="right"))
        row = int(rows[first])
        characters = border - (int(inside[first - 1]) if first else before)  # of this document; 0: it is whole
        begin_cut, end_cut = ([row, 0, characters], [row, characters, None]) if characters else (None, None)
        train[source] = [*(all_of_unit(plan, sums, one, TRAIN) for one in units[:at]),
                         _piece(folder, name, 0, row + bool(characters), begin_cut)]
        validation[source] = [_piece(folder, name, row, end, end_cut),
                              *(all_of_unit(plan, sums, one, TRAIN) for one in units[at + 1:])]
    return [train, validation]


def _piece(folder: Path, unit: str, first: int, end: int, cut: Sequence[int | None] | None) -> ShardPiece:
    _, index = picked(folder, unit, first, end, TRAIN, cut)
    return ShardPiece(unit, first, end, TRAIN, sums_of(index), cut)
