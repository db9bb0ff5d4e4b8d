"""What reading leaves for the passes that follow: documents as they were read and filtered, an index of digests."""

from __future__ import annotations

import struct
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.contract.input_check import outside, refuse_changed
from pipeline.data.documents import Rejection, digest
from pipeline.data.filters.chain import Chain, Dropped
from pipeline.data.planning.signatures import Signer
from pipeline.data.sources import unit_documents
from pipeline.files import atomic_file, output_record

STAGING = "staging"
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


def staged(folder: Path, name: str, ending: str) -> Path:
    """A file of the staged unit `name`: `.documents` (JSON, one after another), `.npy` (rows of INDEX), `.rejected`,
    and where near-duplicates are looked for `.bands` (a row of `planning.signatures` each, as .npy)."""
    return folder / STAGING / f"{name}{ending}"


def stage_unit(folder: Path, payload: dict[str, Any]) -> dict[str, Any]:
    """Read one unit: its documents as the filters leave them, as JSON, one after another, their index, and what could
    not be read; on request the documents that filters dropped.

    Returns the counts `read`, `documents` (staged), `empty`, `rejected` and `lost` (files that break off), those of
    `filters` (see `Chain`), and the files as `outputs`, the staged documents first.

    Raises:
        UserError: a file is not what it was when the stage began, although its size and time are; a filter failed.
    """
    read = [{"path": path, "sha256": digest} for (_, path), digest in
            zip(payload["files"], payload["sha256"], strict=True)]
    for expected in outside(read, "shard"):
        refuse_changed(expected)
    texts, index, rejections = (staged(folder, payload["name"], ending)
                                 for ending in (".documents", ".npy", ".rejected"))
    signer = Signer(payload["near_duplicates"]) if payload.get("near_duplicates") else None
    rows, offset, counts = bytearray(), 0, {"read": 0, "empty": 0, "rejected": 0, "lost": 0}
    chain, aside = Chain(payload.get("filters", ())), folder / DROPPED / f"{payload['name']}.jsonl"
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
                if kept_aside is not None:
                    kept_aside.write(left.line())
                continue
            document, member = left
            rows += index_row(document.text, offset, len(member))
            offset += out.write(member)
            if signer is not None:
                signer.add(document.text)
    with atomic_file(index) as file:
        np.save(file, np.frombuffer(rows, INDEX))
    outputs = [output_record(folder, path) for path in (texts, index, rejections)]
    if signer is not None:
        outputs.append(output_record(folder, signer.write(staged(folder, payload["name"], ".bands"))))
    if kept_aside is not None:
        source, gone = payload["source"]["name"], chain.counts.values()
        outputs.append(output_record(folder, aside, split=DROPPED, source=source,
                                     docs=sum(own["documents"] for own in gone),
                                     text_bytes=sum(own["bytes"] for own in gone)))
    return {"documents": len(rows) // INDEX.itemsize, **counts, "filters": chain.counts, "outputs": outputs}


def index_row(text: str, offset: int, length: int) -> bytes:
    """The row of INDEX of a text whose document is staged at these bytes."""
    data = text.encode()
    high, low = struct.unpack(">QQ", digest(data))
    flags = HAS_NUL * ("\0" in text) + HAS_U2581 * ("\u2581" in text)
    return _ROW.pack(high, low, offset, length, len(data), len(text), flags)
