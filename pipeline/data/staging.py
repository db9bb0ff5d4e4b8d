"""Between reading and writing: documents as they were read, an index of 16-byte digests, and the plan of shards.

Texts stay on disk; memory holds one row of `INDEX` a document.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.data.documents import Rejection, digest, document_key, key_fits
from pipeline.data.sources import unit_documents
from pipeline.data.text_shards import read_documents, write_members
from pipeline.errors import UserError
from pipeline.files import atomic_file, output_record

STAGING = "staging"
PLAN = f"{STAGING}/plan"
SPLITS = ("train", "heldout")
HAS_NUL, HAS_U2581 = 1, 2

INDEX = np.dtype([("high", "<u8"), ("low", "<u8"), ("offset", "<u8"), ("length", "<u8"), ("text_bytes", "<u8"),
                  ("flags", "u1")])
"""A staged document: its digest as two numbers, place and size of its JSON, size of its text, what the text holds."""
_ROW = struct.Struct("<QQQQQB")
PICKED = np.dtype([("unit", "<u4"), ("copy", "<u4"), ("high", "<u8"), ("low", "<u8"), ("offset", "<u8"),
                   ("length", "<u8"), ("text_bytes", "<u8")])
"""A document picked for a shard: the unit it is staged in and the place there; the how-manieth of equal texts it is."""


def stage_unit(folder: Path, payload: dict[str, Any]) -> dict[str, Any]:
    """Read one unit: its documents as JSON, one after another, their index, and what could not be read.

    Returns the counts `documents` (staged), `empty`, `rejected` and `lost` (files that break off), and the three
    files as `outputs`.
    """
    place = folder / STAGING / payload["name"]
    texts, index, rejections = (place.with_suffix(ending) for ending in (".documents", ".npy", ".rejected"))
    rows, offset, counts = bytearray(), 0, {"empty": 0, "rejected": 0, "lost": 0}
    with atomic_file(texts) as out, atomic_file(rejections) as rejected:
        for item in unit_documents(payload):
            if isinstance(item, Rejection):
                counts["rejected"] += item.documents
                counts["lost"] += item.lost
                rejected.write(item.line())
                continue
            document, member = item
            if not document.text.strip():
                counts["empty"] += 1
                continue
            rows += _index_row(document.text, offset, len(member))
            offset += out.write(member)
    with atomic_file(index) as file:
        np.save(file, np.frombuffer(rows, INDEX))
    return {"documents": len(rows) // INDEX.itemsize, **counts,
            "outputs": [output_record(folder, path) for path in (texts, index, rejections)]}


def _index_row(text: str, offset: int, length: int) -> bytes:
    data = text.encode()
    high, low = struct.unpack(">QQ", digest(data))
    flags = HAS_NUL * ("\0" in text) + HAS_U2581 * ("\u2581" in text)
    return _ROW.pack(high, low, offset, length, len(data), flags)


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

    def kept(self, split: str, source: int) -> np.ndarray:
        """Numbers of the documents of one split of one source, in order."""
        return np.flatnonzero(~self.dropped & (self.heldout == (split == "heldout")) & (self.source == source))


def load_corpus(folder: Path, units: list[str], source_of_unit: list[int], heldout_share: float,
                drop_duplicates: bool) -> Corpus:
    """The index of all staged units, with duplicates and the held-out split decided."""
    parts = [np.load(folder / STAGING / f"{unit}.npy") for unit in units]
    index = np.concatenate(parts)
    unit = np.repeat(np.arange(len(parts), dtype=np.uint32), [len(part) for part in parts])
    copy = copies(index["high"], index["low"])
    # high / 2^64 < share; the product is exact, being a power of two times a float.
    heldout = index["high"] < np.uint64(ceil(heldout_share * 2**64))
    return Corpus(index, unit, np.array(source_of_unit)[unit], copy, (copy > 0) & drop_duplicates, heldout)


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
