"""Megatron Core's IndexedDataset: PREFIX.bin with the ids of all documents, PREFIX.idx with where each is.

The index, little-endian: the magic, version 1 (8 bytes), a code for the type of the ids (1 byte), the number of
sequences and that of document indices (8 bytes each); then the length of each sequence (int32), its first byte in the
.bin (int64), and the document indices (int64): 0 and, for each document, the number of sequences up to its end. Here a
document is one sequence. Unsigned ids of four bytes have no code, so they are written as int32.
"""

from __future__ import annotations

import errno
import hashlib
import os
import struct
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.errors import UserError
from tools.export_tokens.plan import Part, Plan, Region

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
CODES = {"uint16": 8, "int32": 4}
WRITTEN_AS = {"uint16": "uint16", "uint32": "int32"}
HEADER = struct.calcsize("<9sQBQQ")
LONGEST = 2**31 - 1


def lay_out(folder: Path, plan: Plan) -> None:
    """Make the files of all sources in their full length, without content but for the index's header."""
    dtype = WRITTEN_AS[plan.dtype]
    for name, own in plan.sources.items():
        with open(folder / f"{name}.bin", "wb") as file:
            file.truncate(own["tokens"] * np.dtype(dtype).itemsize)
        with open(folder / f"{name}.idx", "wb") as file:
            file.truncate(HEADER + 12 * own["docs"] + 8 * (own["docs"] + 1))
            for start, data in _header(plan, own["docs"]):
                _write(file.fileno(), memoryview(data), start)
            os.fsync(file.fileno())


def headers(plan: Plan) -> list[Region]:
    """What `lay_out` writes."""
    return [(f"{name}.idx", start, len(data), hashlib.sha256(data).hexdigest())
            for name, own in plan.sources.items() for start, data in _header(plan, own["docs"])]


def _header(plan: Plan, documents: int) -> list[tuple[int, bytes]]:
    """Where in an index, and what: its header, and the first document index, which belongs to no shard."""
    code = CODES[WRITTEN_AS[plan.dtype]]
    return [(0, struct.pack("<9sQBQQ", MAGIC, VERSION, code, documents, documents + 1)),
            (HEADER + 12 * documents, struct.pack("<q", 0))]


def write_part(job: tuple[Path, Part, int]) -> list[Region]:
    """Write one shard's part of its source's two files, durably.

    Args:
        job: the export's folder, the part, the documents of its source.
    """
    folder, part, documents = job
    part.refuse_changed()
    name, (before, own) = part.source, part.documents
    dtype = np.dtype(WRITTEN_AS[part.shard.dtype.name]).newbyteorder("<")
    lengths = part.lengths()
    if len(lengths) and lengths.max() > LONGEST:
        raise UserError(f"{part.shard.path}: its document {int(lengths.argmax())} has {int(lengths.max()):,} tokens; "
                        f"Megatron's index holds lengths up to {LONGEST:,}. Cut the document "
                        f"(shard.max_document_mb), or leave its source out (--source).")
    with open(folder / f"{name}.bin", "r+b") as file:
        regions = [_tokens(file.fileno(), f"{name}.bin", part, dtype)]
        os.fsync(file.fileno())
    ends = np.cumsum(lengths, dtype=np.int64)
    columns = ((HEADER + 4 * before, lengths.astype("<i4")),
               (HEADER + 4 * documents + 8 * before,
                ((part.tokens[0] + ends - lengths) * dtype.itemsize).astype("<i8")),
               (HEADER + 12 * documents + 8 * (before + 1), np.arange(before + 1, before + own + 1, dtype="<i8")))
    with open(folder / f"{name}.idx", "r+b") as file:
        for start, values in columns:
            data = values.tobytes()
            _write(file.fileno(), memoryview(data), start)
            regions.append((f"{name}.idx", start, len(data), hashlib.sha256(data).hexdigest()))
        os.fsync(file.fileno())
    return regions


def facts(plan: Plan) -> dict[str, Any]:
    """What the manifest says of the form."""
    dtype = WRITTEN_AS[plan.dtype]
    return {"layout": "Megatron Core IndexedDataset, version 1; a document is one sequence",
            "dtype": dtype, "dtype_code": CODES[dtype], "prefixes": list(plan.sources)}


def _tokens(descriptor: int, path: str, part: Part, dtype: np.dtype[Any]) -> Region:
    start = at = part.tokens[0] * dtype.itemsize
    digest = hashlib.sha256()
    for _, _, tokens in part.blocks():
        if dtype.kind == "i" and len(tokens) and tokens.max() > np.iinfo(np.int32).max:
            raise UserError(f"{part.shard.path} holds the id {tokens.max()}, which Megatron's int32 cannot hold.")
        data = np.ascontiguousarray(tokens.astype(dtype)).view(np.uint8).data
        _write(descriptor, data, at)
        digest.update(data)
        at += len(data)
    if at - start != part.tokens[1] * dtype.itemsize:
        raise UserError(f"{part.shard.path} gave {(at - start) // dtype.itemsize:,} tokens instead of "
                        f"{part.tokens[1]:,}. Run --stage encode again.")
    return path, start, at - start, digest.hexdigest()


def _write(descriptor: int, data: memoryview, at: int) -> None:
    done = 0
    while done < len(data):  # Linux writes at most 2 GB at once
        count = os.pwrite(descriptor, data[done:], at + done)
        if count == 0:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        done += count
