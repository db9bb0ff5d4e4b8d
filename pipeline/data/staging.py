"""Between reading and writing: documents as they were read and filtered, an index of 16-byte digests, the two splits,
and the plan of shards.

Texts stay on disk; memory holds one row of `INDEX` a document.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from fractions import Fraction
from math import ceil
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.contract.input_check import outside, refuse_changed
from pipeline.data.data_card import DataCard
from pipeline.data.documents import Document, Rejection, digest, document_key, from_json, key_fits, to_json
from pipeline.data.filters.chain import Chain, Dropped
from pipeline.data.sources import unit_documents
from pipeline.data.text_shards import read_documents, write_members
from pipeline.errors import UserError
from pipeline.files import atomic_file, output_record

STAGING = "staging"
PLAN = f"{STAGING}/plan"
DROPPED = "dropped"
"""Folder of the documents that filters dropped, a file for each unit, where they are kept."""
CUT = "cut"
"""Name of the staged unit with the two parts of each document that was cut; a unit that was read has a number."""
SPLITS = ("train", "heldout")
HAS_NUL, HAS_U2581 = 1, 2

INDEX = np.dtype([("high", "<u8"), ("low", "<u8"), ("offset", "<u8"), ("length", "<u8"), ("text_bytes", "<u8"),
                  ("characters", "<u8"), ("flags", "u1")])
"""A staged document: its digest as two numbers, place and size of its JSON, size of its text, what the text holds."""
_ROW = struct.Struct("<QQQQQQB")
PICKED = np.dtype([("unit", "<u4"), ("copy", "<u4"), ("high", "<u8"), ("low", "<u8"), ("offset", "<u8"),
                   ("length", "<u8"), ("text_bytes", "<u8")])
"""A document picked for a shard: the unit it is staged in and the place there; the how-manieth of equal texts it is."""


def stage_unit(folder: Path, payload: dict[str, Any]) -> dict[str, Any]:
    """Read one unit: its documents as the filters leave them, as JSON, one after another, their index, and what could
    not be read; on request the documents that filters dropped.

    Returns the counts `read`, `documents` (staged), `empty`, `rejected` and `lost` (files that break off), those of
    `filters` (see `Chain`), its `card` (see `DataCard`), and the files as `outputs`, the staged documents first.

    Raises:
        UserError: a file is not what it was when the stage began, although its size and time are; a filter failed.
    """
    read = [{"path": path, "sha256": digest} for (_, path), digest in
            zip(payload["files"], payload["sha256"], strict=True)]
    for expected in outside(read, "shard"):
        refuse_changed(expected)
    place = folder / STAGING / payload["name"]
    texts, index, rejections = (place.with_suffix(ending) for ending in (".documents", ".npy", ".rejected"))
    rows, offset, counts = bytearray(), 0, {"read": 0, "empty": 0, "rejected": 0, "lost": 0}
    chain, aside = Chain(payload.get("filters", ())), folder / DROPPED / f"{payload['name']}.jsonl"
    card = DataCard(payload.get("examples", 0))
    with (atomic_file(texts) as out, atomic_file(rejections) as rejected,
          atomic_file(aside) if payload.get("keep_dropped") else nullcontext() as kept_aside):
        for item in unit_documents(payload):
            if isinstance(item, Rejection):
                counts["read"] += item.documents
                counts["rejected"] += item.documents
                counts["lost"] += item.lost
                rejected.write(item.line())
                continue
            counts["read"] += 1
            if not item[0].text.strip():
                counts["empty"] += 1
                continue
            left = chain(*item)
            if isinstance(left, Dropped):
                card.drop(left)
                if kept_aside is not None:
                    kept_aside.write(left.line())
                continue
            document, member = left
            card.add(document, changed=document is not item[0] and document != item[0])
            rows += _index_row(document.text, offset, len(member))
            offset += out.write(member)
    with atomic_file(index) as file:
        np.save(file, np.frombuffer(rows, INDEX))
    outputs = [output_record(folder, path) for path in (texts, index, rejections)]
    if kept_aside is not None:
        source, gone = payload["source"]["name"], chain.counts.values()
        outputs.append(output_record(folder, aside, split=DROPPED, source=source,
                                     docs=sum(own["documents"] for own in gone),
                                     text_bytes=sum(own["bytes"] for own in gone)))
    return {"documents": len(rows) // INDEX.itemsize, **counts, "filters": chain.counts, "card": card.record(),
            **({"findings": found} if (found := chain.findings()) else {}), "outputs": outputs}


def _index_row(text: str, offset: int, length: int) -> bytes:
    data = text.encode()
    high, low = struct.unpack(">QQ", digest(data))
    flags = HAS_NUL * ("\0" in text) + HAS_U2581 * ("\u2581" in text)
    return _ROW.pack(high, low, offset, length, len(data), len(text), flags)


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
                drop_duplicates: bool) -> Corpus:
    """The index of all staged units, with duplicates decided, and the held-out split by hash."""
    parts = [np.load(folder / STAGING / f"{unit}.npy") for unit in units]
    index = np.concatenate(parts)
    unit = np.repeat(np.arange(len(parts), dtype=np.uint32), [len(part) for part in parts])
    copy = copies(index["high"], index["low"])
    # high / 2^64 < share; the product is exact, being a power of two times a float.
    heldout = index["high"] < np.uint64(ceil(heldout_share * 2**64))
    return Corpus(index, unit, np.array(source_of_unit)[unit], copy, (copy > 0) & drop_duplicates, heldout)


def hold_out_tails(folder: Path, corpus: Corpus, units: list[str], heldout_share: float) -> tuple[Corpus, str]:
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
    parts, staged = _stage_parts(folder, corpus, units, borders)
    cut = np.array(sorted(borders), dtype=np.int64)
    order = np.sort(np.append(np.arange(len(corpus)), cut))  # the cut ones twice: their two parts
    heads = cut + np.arange(len(cut))
    index, unit, heldout = corpus.index[order], corpus.unit[order], heldout[order]
    heldout[heads] = False
    for half, places in enumerate((heads, heads + 1)):
        index[places], unit[places] = parts[half::2], len(units)
    return replace(corpus, index=index, unit=unit, source=corpus.source[order], dropped=corpus.dropped[order],
                   heldout=heldout, copy=copies(index["high"], index["low"])), staged


def _stage_parts(folder: Path, corpus: Corpus, units: list[str], borders: dict[int, int]) -> tuple[np.ndarray, str]:
    """Stage both parts of each document of `borders` (its row -> characters of the first part), in order.

    Returns:
        Rows of `INDEX`, two for each document, and the hash of the staged parts.
    """
    path, rows, offset = folder / STAGING / f"{CUT}.documents", bytearray(), 0
    with atomic_file(path) as out:
        for row, border in sorted(borders.items()):
            with open(folder / STAGING / f"{units[corpus.unit[row]]}.documents", "rb") as file:
                file.seek(int(corpus.index["offset"][row]))
                whole = from_json(file.read(int(corpus.index["length"][row])), "")
            for text, place in ((whole.text[:border], f"[:{border}]"), (whole.text[border:], f"[{border}:]")):
                member = to_json(Document(text, whole.source, whole.id + place, whole.meta))
                rows += _index_row(text, offset, len(member))
                offset += out.write(member)
    return np.frombuffer(rows, INDEX), str(output_record(folder, path)["sha256"])


def copies(high: np.ndarray, low: np.ndarray) -> np.ndarray:
    """For each (high, low) pair, how many equal pairs stand before it."""
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


def plan_shards(folder: Path, corpus: Corpus, units: list[str], staged: list[str], sources: list[str],
                target: float) -> list[dict[str, Any]]:
    """Write which documents make which shard, and give the payloads for `write_unit`, in order.

    Args:
        staged: hash of the staged documents of each unit, so that a shard is made again if they changed.
        target: bytes of text per shard.
    """
    payloads = []
    for split in SPLITS:
        for number, source in enumerate(sources):
            chosen = corpus.kept(split, number)
            shards = shard_numbers(corpus.index["text_bytes"][chosen], target)
            for shard, rows in enumerate(np.split(chosen, np.flatnonzero(np.diff(shards)) + 1) if len(chosen) else []):
                picked = np.empty(len(rows), PICKED)
                picked["unit"], picked["copy"] = corpus.unit[rows], corpus.copy[rows]
                for name in ("high", "low", "offset", "length", "text_bytes"):
                    picked[name] = corpus.index[name][rows]
                name = f"{source}-{shard:05d}"
                with atomic_file(folder / PLAN / split / f"{name}.npy") as file:
                    np.save(file, picked)
                used = np.unique(picked["unit"]).tolist()
                payloads.append({"split": split, "source": source, "name": name,
                                 "units": {str(unit): units[unit] for unit in used},
                                 "picked": hashlib.sha256(picked.tobytes()).hexdigest(),
                                 "staged": [staged[unit] for unit in used]})
    return payloads


def write_unit(folder: Path, payload: dict[str, Any]) -> dict[str, Any]:
    """Write one shard and read it back: its record, as one of `outputs`.

    Raises:
        UserError: what is read back is not what was picked.
    """
    picked = np.load(folder / PLAN / payload["split"] / f"{payload['name']}.npy")
    path = folder / payload["split"] / f"{payload['name']}.tar"
    write_members(path, _members(folder, payload["units"], picked))
    expected = _keys(picked)
    for document in read_documents(path):
        if document.key != next(expected, None) or not key_fits(document):
            raise UserError(f"{path} does not read back as it was written, at the document {document.id}. Check the "
                            f"disk, and run the stage again.")
    if (missing := next(expected, None)) is not None:
        raise UserError(f"{path} ends before the document {missing}. Check the disk, and run the stage again.")
    return {"outputs": [output_record(folder, path, split=payload["split"], source=payload["source"],
                                      docs=len(picked), text_bytes=int(picked["text_bytes"].sum()))]}


def _keys(picked: np.ndarray) -> Iterator[str]:
    for high, low, copy in zip(picked["high"], picked["low"], picked["copy"], strict=True):
        yield document_key(struct.pack(">QQ", high, low), copy)


def _members(folder: Path, units: dict[str, str], picked: np.ndarray) -> Iterator[tuple[str, bytes]]:
    keys = _keys(picked)
    runs = np.flatnonzero(np.diff(picked["unit"].astype(np.int64))) + 1
    for rows in np.split(np.arange(len(picked)), runs):
        unit = units[str(picked["unit"][rows[0]])]
        with open(folder / STAGING / f"{unit}.documents", "rb") as file:
            for row in rows:
                file.seek(int(picked["offset"][row]))
                yield next(keys), file.read(int(picked["length"][row]))
