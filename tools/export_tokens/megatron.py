"""Write Megatron Core's IndexedDataset: PREFIX.bin has the ids of all documents, PREFIX.idx their places.

The index, little-endian: the magic, version 1 (8 bytes), a code for the type of the ids (1 byte), the number of
sequences and that of document indices (8 bytes each); then the length of each sequence (int32), its first byte in the
.bin (int64), and the document indices (int64): 0 and, for each document, the number of sequences up to its end. Here a
document is one sequence. Unsigned ids of four bytes have no code, so they are written as int32.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from drover.pipeline.core.errors import UserError
from drover.pipeline.core.files import Record, flush
from drover.tools.export_tokens.part import Counts, Part, Region

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
CODES = {"uint16": 8, "int32": 4}
WRITTEN_AS = {"uint16": "uint16", "uint32": "int32"}
HEADER = struct.calcsize("<9sQBQQ")
LONGEST = 2**31 - 1


def lay_out(folder: Path, sources: Counts, dtype: str) -> list[Region]:
    """Make the files of all sources in their full length. Of the content, write only the index's header and the first
    document index, which belong to no shard."""
    written, regions = WRITTEN_AS[dtype], list[Region]()
    for name, own in sources.items():
        documents = own["docs"]
        with open(folder / f"{name}.bin", "wb") as file:
            file.truncate(own["tokens"] * np.dtype(written).itemsize)
        with open(folder / f"{name}.idx", "wb") as file:
            file.truncate(HEADER + 12 * documents + 8 * (documents + 1))
        header = struct.pack("<9sQBQQ", MAGIC, VERSION, CODES[written], documents, documents + 1)
        regions += _write(folder / f"{name}.idx", [(0, header), (HEADER + 12 * documents, struct.pack("<q", 0))])
        regions += _write(folder / f"{name}.bin", [(0, b"")])
    return regions


def write_part(job: tuple[Path, Part]) -> list[Region]:
    """Write one shard's part of its source's two files, durably. job: the export's folder, the part."""
    folder, part = job
    part.refuse_changed()
    name, before, documents = part.shard.source, part.before["docs"], part.source_documents
    dtype = np.dtype(WRITTEN_AS[part.shard.dtype.name]).newbyteorder("<")
    lengths = part.lengths()
    if len(lengths) and lengths.max() > LONGEST:
        raise UserError(f"{part.shard.path}: its document {lengths.argmax()} has {lengths.max():,} tokens; "
                        f"Megatron's index holds lengths up to {LONGEST:,}. Cut the document "
                        f"(shard.max_document_mb), or leave its source out (--source).")
    ends, first = np.cumsum(lengths, dtype=np.int64), part.before["tokens"]

    def tokens() -> Iterator[tuple[int, bytes]]:
        at = first
        for _, _, found in part.blocks():
            yield at * dtype.itemsize, found.astype(dtype).tobytes()
            at += len(found)
        if at - first != part.own["tokens"]:
            raise UserError(f"{part.shard.path} gave {at - first:,} tokens instead of {part.own['tokens']:,}. Run "
                            f"--stage encode again.")
    columns = ((HEADER + 4 * before, lengths.astype("<i4")),
               (HEADER + 4 * documents + 8 * before,
                ((first + ends - lengths) * dtype.itemsize).astype("<i8")),
               (HEADER + 12 * documents + 8 * (before + 1),
                np.arange(before + 1, before + part.own["docs"] + 1, dtype="<i8")))
    return [*_write(folder / f"{name}.bin", tokens()),
            *_write(folder / f"{name}.idx", [(start, values.tobytes()) for start, values in columns])]


def finish(folder: Path, count: int, dtype: str, made_of: Record) -> list[str]:
    """Write nothing after the parts."""
    return []


def facts(sources: Counts, dtype: str) -> Record:
    """The manifest's description of the format."""
    return {"layout": "Megatron Core IndexedDataset, version 1; a document is one sequence",
            "dtype": WRITTEN_AS[dtype], "dtype_code": CODES[WRITTEN_AS[dtype]], "prefixes": list(sources)}


def _write(path: Path, pieces: Iterable[tuple[int, bytes]]) -> list[Region]:
    """Write pieces (first byte, content) into an existing file, durably."""
    regions = []
    with open(path, "r+b") as file:
        for start, content in pieces:
            file.seek(start)
            file.write(content)
            regions.append((path.name, start, len(content), hashlib.sha256(content).hexdigest()))
        flush(file)
    return regions
