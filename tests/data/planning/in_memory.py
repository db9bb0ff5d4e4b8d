"""The plan of shards as one process makes it with all documents in memory: what the passes are compared with.

This is how the stage itself worked before there were passes (but for `keep`), kept as it was.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from math import ceil
from pathlib import Path

import numpy as np

from pipeline.data.documents import Document, document_key, from_json, to_json
from pipeline.data.planning.shards import CUT
from pipeline.data.reading import INDEX, index_row, staged
from pipeline.data.text_shards import SPLITS, write_members
from pipeline.files import atomic_file


@dataclass(frozen=True)
class Corpus:
    """All staged documents in order, and what becomes of each.

    Attributes:
        index: rows of `INDEX`.
        unit: (n,) number of the unit that each document is staged in.
        source: (n,) number of its source.
        copy: (n,) how many documents before it have the same text.
        dropped: (n,) whether it is a duplicate to be left out.
        heldout: (n,) whether it is in the held-out split.
    """

    index: np.ndarray
    unit: np.ndarray
    source: np.ndarray
    copy: np.ndarray
    dropped: np.ndarray
    heldout: np.ndarray

    def __len__(self) -> int:
        return len(self.index)

    def kept(self, split: str, source: int) -> np.ndarray:
        """Numbers of the documents of one split of one source, in order."""
        return np.flatnonzero(~self.dropped & (self.heldout == (split == "heldout")) & (self.source == source))


def load_corpus(folder: Path, units: list[str], source_of_unit: list[int], heldout_share: float,
                drop_duplicates: bool, keep: str = "first") -> Corpus:
    """The index of all staged units, with duplicates decided, and the held-out split by hash."""
    parts = [np.load(staged(folder, unit, ".npy")) for unit in units]
    index = np.concatenate(parts)
    unit = np.repeat(np.arange(len(parts), dtype=np.uint32), [len(part) for part in parts])
    copy = copies(index["high"], index["low"], keep)
    # high / 2^64 < share; the product is exact, being a power of two times a float.
    heldout = index["high"] < np.uint64(ceil(heldout_share * 2**64))
    return Corpus(index, unit, np.array(source_of_unit)[unit], copy, (copy > 0) & drop_duplicates, heldout)


def hold_out_tails(folder: Path, corpus: Corpus, units: list[str], heldout_share: float, keep: str) -> Corpus:
    """Hold out the last share of each source's characters instead, cutting the document in which the border falls.

    Of a source's n characters that are kept, the first int(n * (1 - share)) stay in the training split. The two parts
    of each document that is cut are staged as one more unit, whose number is len(units).

    Returns:
        The corpus with the parts in the places of the cut documents, and the hash of the parts as they are staged.
    """
    trained = 1 - Fraction(str(heldout_share))  # as it was written: in floats, 1 - 0.9 is less than 0.1
    heldout, borders = np.zeros(len(corpus), bool), {}
    for source in np.unique(corpus.source):
        rows = np.flatnonzero(~corpus.dropped & (corpus.source == source))
        ends = np.cumsum(corpus.index["characters"][rows]).astype(np.int64)
        border = int(int(ends[-1]) * trained) if len(rows) else 0
        first = int(np.searchsorted(ends, border, side="right"))
        heldout[rows[first:]] = True
        before = int(ends[first - 1]) if first else 0
        if before < border:  # then it is inside of document `first`
            borders[int(rows[first])] = border - before
    parts = _stage_parts(folder, corpus, units, borders)
    cut = np.array(sorted(borders), dtype=np.int64)
    order = np.sort(np.append(np.arange(len(corpus)), cut))  # the cut ones twice: their two parts
    heads = cut + np.arange(len(cut))
    index, unit, heldout = corpus.index[order], corpus.unit[order], heldout[order]
    heldout[heads] = False
    for half, places in enumerate((heads, heads + 1)):
        index[places], unit[places] = parts[half::2], len(units)
    return replace(corpus, index=index, unit=unit, source=corpus.source[order], dropped=corpus.dropped[order],
                   heldout=heldout, copy=copies(index["high"], index["low"], keep))


def _stage_parts(folder: Path, corpus: Corpus, units: list[str], borders: dict[int, int]) -> np.ndarray:
    """Stage both parts of each document of `borders` (its row -> characters of the first part), in order.

    Returns:
        Rows of `INDEX`, two for each document, and the hash of the staged parts.
    """
    path, rows, offset = staged(folder, CUT, ".documents"), bytearray(), 0
    with atomic_file(path) as out:
        for row, border in sorted(borders.items()):
            with open(staged(folder, units[corpus.unit[row]], ".documents"), "rb") as file:
                file.seek(int(corpus.index["offset"][row]))
                whole = from_json(file.read(int(corpus.index["length"][row])), "")
            for text, place in ((whole.text[:border], f"[:{border}]"), (whole.text[border:], f"[{border}:]")):
                member = to_json(Document(text, whole.source, whole.id + place, whole.meta))
                rows += index_row(text, offset, len(member))
                offset += out.write(member)
    return np.frombuffer(rows, INDEX)


def copies(high: np.ndarray, low: np.ndarray, keep: str = "first") -> np.ndarray:
    """For each (high, low) pair, how many equal pairs stand before it; with `last`, after it."""
    if keep == "last":
        return copies(high[::-1], low[::-1])[::-1]
    order = np.lexsort((low, high))  # stable: equal pairs stay in their order
    new = np.ones(len(order), bool)
    new[1:] = (high[order][1:] != high[order][:-1]) | (low[order][1:] != low[order][:-1])
    starts = np.flatnonzero(new)
    within = np.arange(len(order)) - np.repeat(starts, np.diff(np.append(starts, len(order))))
    result = np.empty(len(order), np.uint32)
    result[order] = within
    return result


def shard_numbers(sizes: np.ndarray, target: float) -> np.ndarray:
    """Which shard each document goes to: runs of about equal size, as few as keep to `target` bytes on average."""
    before = np.cumsum(sizes) - sizes
    total = int(sizes.sum())
    count = max(1, ceil(total / target))
    numbers = np.floor(before * (count / max(total, 1))).astype(np.int64)
    return np.unique(numbers, return_inverse=True)[1]  # a document larger than a shard leaves a gap


def write_shards(folder: Path, corpus: Corpus, units: list[str], sources: list[str], target: float) -> dict[str, Path]:
    """Write all shards of `target` bytes of text each; their paths by split and name."""
    found = {}
    for split in SPLITS:
        for number, source in enumerate(sources):
            chosen = corpus.kept(split, number)
            shards = shard_numbers(corpus.index["text_bytes"][chosen], target)
            for shard, rows in enumerate(np.split(chosen, np.flatnonzero(np.diff(shards)) + 1) if len(chosen) else []):
                name = f"{split}/{source}-{shard:05d}"
                found[name] = folder / "expected" / f"{name}.tar"
                write_members(found[name], _members(folder, units, corpus, rows))
    return found


def _members(folder: Path, units: list[str], corpus: Corpus, rows: np.ndarray) -> Iterator[tuple[str, bytes]]:
    for row in rows:
        place = corpus.index[row]
        with open(staged(folder, units[corpus.unit[row]], ".documents"), "rb") as file:
            file.seek(int(place["offset"]))
            yield (document_key(struct.pack(">QQ", place["high"], place["low"]), corpus.copy[row]),
                   file.read(int(place["length"])))
