"""The plan of shards, computed from sums over units alone, and the writing of one."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.data.documents import document_key, key_fits
from pipeline.data.planning.decisions import SUMS, Summary, decisions_path
from pipeline.data.planning.origins import PLACES, read_places, write_origins
from pipeline.data.planning.runs import Layout, group_name
from pipeline.data.reading import staged
from pipeline.data.text_shards import SPLITS, read_documents, write_members
from pipeline.errors import UserError
from pipeline.files import output_record

CUT = "cut"
"""Name of the staged unit with the two parts of each document that was cut; a unit that was read has a number."""
PICKED = np.dtype([("high", "<u8"), ("low", "<u8"), ("offset", "<u8"), ("length", "<u8"), ("text_bytes", "<u8"),
                   ("copy", "<u4"), ("row", "<u8")])
"""A document picked for a shard: its digest, its place in the unit's staged documents, its size, how many equal ones
are before it, its row in the unit's index."""


@dataclass(frozen=True)
class Pieces:
    """Stretches of units, in order, of which the documents with one fate make one split of one source.

    Attributes:
        unit: (n,) number of the unit; that of the unit `cut` is the number of units that were read.
        rows: (n, 2) first row of the unit and the one after the last.
        fate: what the documents have as their fate there.
        sums: (n, SUMS) over them.
        large: (piece, bytes before it in the piece, bytes) of each large document.
    """

    unit: np.ndarray
    rows: np.ndarray
    fate: int
    sums: np.ndarray
    large: list[tuple[int, int, int]]

    def total(self, what: str) -> int:
        """One of SUMS over all pieces."""
        return int(self.sums[:, SUMS.index(what)].sum())


def pieces_by_hash(layout: Layout, summary: Summary, sources: int) -> list[list[Pieces]]:
    """What makes each split, by the documents' fates; for each split and source."""
    documents = np.diff(layout.starts)
    first = np.searchsorted(layout.sources, np.arange(sources + 1))
    large: dict[tuple[int, int], list[tuple[int, int, int]]] = {}
    for unit, split, before, size in summary.large:
        source = int(layout.sources[unit])
        large.setdefault((split, source), []).append((unit - int(first[source]), before, size))
    return [[Pieces(units, np.stack([np.zeros_like(units), documents[units]], 1), split, summary.sums[units, split],
                    large.get((split, source), []))
             for source, units in enumerate(np.split(np.arange(len(documents)), first[1:-1]))]
            for split in range(len(SPLITS))]


def shard_borders(total: int, target: float, large: Sequence[tuple[int, int]] = ()) -> np.ndarray:
    """Cut documents into runs of about equal size, as few as keep to `target` bytes on average.

    Args:
        total: bytes of all documents.
        large: (bytes before it, bytes) of each document of at least `LARGE` * target. A shard in which no document
            would begin is left out.

    Returns:
        (shards + 1,) A shard holds the documents that begin (have as many bytes before them) from its border on and
        before the next. They are those with the same floor(bytes before * (count / total)), in float64.
    """
    count = max(1, ceil(total / target))
    scale = count / max(total, 1)
    numbers = np.arange(count)
    borders = np.ceil(numbers / scale).astype(np.int64)
    while (low := borders * scale < numbers).any():  # rounding is off by one at times
        borders += low
    while (high := (borders > 0) & ((borders - 1) * scale >= numbers)).any():
        borders -= high
    borders = np.append(borders, total)
    begun = np.ones(count, bool)
    for before, size in large:
        begun[np.searchsorted(borders, before, "right"):max(0, np.searchsorted(borders, before + size, "right") - 1)
              ] = False
    return np.append(borders[:-1][begun], total)


def plan_shards(layout: Layout, pieces: list[list[Pieces]], target: float, sources: list[str],
                staged_hashes: Sequence[str], decided: Sequence[str],
                changed_copies: list[list[int]] | None = None) -> list[dict[str, Any]]:
    """The payloads for `write_shard`, in order.

    Args:
        pieces: for each split and source.
        target: bytes of text per shard.
        staged_hashes: hash of the staged documents of each unit, that of `cut` last where there is one.
        decided: hash of the decisions of each group, that of `cut` last.
        changed_copies: see `tails.Cuts`.
    """
    group_of = np.repeat(np.arange(len(layout.groups) - 1), np.diff(layout.groups))
    payloads = []
    for split, of_sources in zip(SPLITS, pieces, strict=True):
        for source, own in zip(sources, of_sources, strict=True):
            for number, chosen in enumerate(_cut(own, target)):
                units = [unit for unit, _, _ in chosen]
                groups = sorted({int(group_of[unit]) if unit < len(group_of) else -1 for unit in units})
                payload = {"split": split, "source": source, "name": f"{source}-{number:05d}", "fate": own.fate,
                           "pieces": [_piece(layout, group_of, unit, rows, share) for unit, rows, share in chosen],
                           "staged": [staged_hashes[unit] for unit in units],
                           "decided": [decided[group] for group in groups]}
                payloads.append({**payload, "changed_copies": changed_copies} if changed_copies else payload)
    return payloads


def _cut(pieces: Pieces, target: float) -> Iterator[list[tuple[int, list[int], list[int]]]]:
    """For each shard its pieces: the unit, its rows, and which bytes of the piece begin the shard's documents."""
    there = np.flatnonzero(pieces.sums[:, 0])
    if not len(there):
        return
    sizes = pieces.sums[there, SUMS.index("text_bytes")]
    ends = np.cumsum(sizes)
    before = ends - sizes
    of = {int(piece): int(start) for piece, start in zip(there, before, strict=True)}
    borders = shard_borders(int(ends[-1]), target, [(of[piece] + own, size) for piece, own, size in pieces.large])
    firsts, lasts = np.searchsorted(ends, borders[:-1], "right"), np.searchsorted(before, borders[1:], "left")
    rows = pieces.rows[there].tolist()
    units, starts, lengths = pieces.unit[there].tolist(), before.tolist(), sizes.tolist()
    for low, high, first, last in zip(borders.tolist(), borders[1:].tolist(), firsts.tolist(), lasts.tolist(),
                                      strict=False):
        yield [(units[own], rows[own], [max(0, low - starts[own]), min(lengths[own], high - starts[own])])
               for own in range(first, last)]


def _piece(layout: Layout, group_of: np.ndarray, unit: int, rows: list[int], share: list[int]) -> list[Any]:
    """[unit, decisions, the unit's first row there, its first document's number, rows, bytes]."""
    if unit == len(group_of):
        return [CUT, CUT, 0, None, rows, share]
    group, start = int(group_of[unit]), int(layout.starts[unit])
    return [layout.names[unit], group_name(group), start - int(layout.starts[layout.groups[group]]), start, rows, share]


def write_shard(folder: Path, payload: dict[str, Any]) -> dict[str, Any]:
    """Write one shard and read it back: its record as the first of `outputs`; then that of its documents' origins,
    where their ids do not say them.

    Raises:
        UserError: what is read back is not what was picked.
    """
    picked = [(piece[0], _pick(folder, payload, piece)) for piece in payload["pieces"]]
    path = folder / payload["split"] / f"{payload['name']}.tar"
    write_members(path, _members(folder, picked))
    expected = (key for _, rows in picked for key in _keys(rows))
    for document in read_documents(path):
        if document.key != next(expected, None) or not key_fits(document):
            raise UserError(f"{path} does not read back as it was written, at the document {document.id}. Check the "
                            f"disk, and run the stage again.")
    if (missing := next(expected, None)) is not None:
        raise UserError(f"{path} ends before the document {missing}. Check the disk, and run the stage again.")
    record = output_record(folder, path, split=payload["split"], source=payload["source"],
                           docs=sum(len(rows) for _, rows in picked),
                           text_bytes=sum(int(rows["text_bytes"].sum()) for _, rows in picked))
    places = [place for unit, rows in picked for place in read_places(staged(folder, unit, PLACES), rows["row"])]
    return {"outputs": [record, *write_origins(folder, record["path"], payload["source"], places)]}


def _pick(folder: Path, payload: dict[str, Any], piece: list[Any]) -> np.ndarray:
    """Rows of PICKED: the documents of a piece that begin at its bytes."""
    unit, decided, offset, number, (first, end), (low, high) = piece
    index = np.load(staged(folder, unit, ".npy"), mmap_mode="r")
    decisions = np.load(decisions_path(folder, decided), mmap_mode="r")[offset + first:offset + end]
    rows = np.flatnonzero(decisions["fate"] == payload["fate"])
    before = np.cumsum(index["text_bytes"][first:end][rows], dtype=np.int64)
    before -= index["text_bytes"][first:end][rows].astype(np.int64)
    rows = rows[(before >= low) & (before < high)]
    picked = np.empty(len(rows), PICKED)
    for name in ("high", "low", "offset", "length", "text_bytes"):
        picked[name] = index[name][first:end][rows]
    picked["copy"], picked["row"] = decisions["copy"][rows], first + rows
    if number is not None:
        for text_high, text_low, begin, stop, change in payload.get("changed_copies", ()):
            equal = (picked["high"] == text_high) & (picked["low"] == text_low)
            place = number + first + rows
            picked["copy"][equal & (begin <= place) & (place < stop)] += np.uint32(change % 2**32)
    return picked


def _keys(picked: np.ndarray) -> Iterator[str]:
    for high, low, copy in zip(picked["high"], picked["low"], picked["copy"], strict=True):
        yield document_key(struct.pack(">QQ", high, low), copy)


def _members(folder: Path, picked: list[tuple[str, np.ndarray]]) -> Iterator[tuple[str, bytes]]:
    for unit, rows in picked:
        with open(staged(folder, unit, ".documents"), "rb") as file:
            for key, offset, length in zip(_keys(rows), rows["offset"].tolist(), rows["length"].tolist(), strict=True):
                file.seek(offset)
                yield key, file.read(length)
