"""Files of token ids that other programs made, and their documents.

| ending | what | documents end |
|---|---|---|
| .bin with .idx | Megatron's IndexedDataset, version 1 | where the index says |
| .bin | llm.c's, by the number that it begins with, or bare ids, as nanoGPT writes them | at separators |
| .npy | bare ids, as OLMo writes them, or numpy's own format | at separators |
| .ds | datatrove's; with .ds.index and .ds.metadata | where the index says |
| .parquet, .arrow | a column of lists, as `datasets` writes them | with their row |

Separators, which are BOS, EOS and those of the settings, end documents in all of them.

A part of a file is a range of its bytes. It has the documents that begin there, so parts that cover a file give each
document once, in order, whoever reads them.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import reduce
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from drover.pipeline.core.errors import UserError
from drover.pipeline.data.documents import damage
from drover.pipeline.data.streams import arrow_reader, map_file
from drover.pipeline.data.token_shards import Ids, Integers

BLOCK_IDS = 1 << 22
"""Ids that are in memory at once, unless one document has more."""
MOST_IDS = 1 << 27
"""A longer document is refused: files of a tokenizer with another EOS would be one."""
MEGATRON = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
"""Types of ids by the codes of Megatron's index."""
LLM_C = {(20240520, 1): 2, (20240801, 7): 4}
"""Bytes of an id by the number and version with which llm.c's files begin: GPT-2's and Llama 3's."""
LLM_C_HEADER = 1024

Block = tuple[Ids, Integers]
"""The ids of documents, one after another, and positions in them, ascending, at which the format ends documents."""
Begins = Callable[[int, int], Integers]
"""Where documents begin, from one position on below another."""


def read_tokens(path: Path, low: int, high: int, kind: str, column: str, separators: Sequence[int]) -> Iterator[Block]:
    """The documents that begin in the bytes [low, high) of a file.

    kind: the type of ids if the file does not say it. column: of Parquet and Arrow files.

    Raises:
        UserError: it cannot be read, is cut, or in another format.
    """
    unreadable: tuple[type[Exception], ...] = (ValueError, *damage())
    try:
        if path.suffix in (".parquet", ".arrow"):
            yield from _rows(path, low, high, column)
        else:
            yield from _flat(path, low, high, kind, separators)
    except unreadable as error:
        raise UserError(f"{path} is cut or not what its name says: {error}. Copy it again, or correct the source's "
                        f"`paths`, `dtype`, `column` or `separators`.") from None


def split_documents(block: Block, separators: Sequence[int]) -> tuple[Ids, Integers]:
    """The ids without separators, and how many each document has. What has no ids is no document."""
    ids, borders = block
    is_separator = among(ids, separators)
    at = np.flatnonzero(is_separator)
    begins = np.sort(np.concatenate([[0], at + 1, borders]), kind="stable")
    ends = np.sort(np.concatenate([at, borders, [len(ids)]]), kind="stable")
    lengths = ends - begins
    return ids[~is_separator], lengths[lengths > 0]


def among(ids: Ids, separators: Sequence[int]) -> NDArray[np.bool_]:
    """Which of the ids are separators."""
    return reduce(np.logical_or, (ids == separator for separator in separators))


def _flat(path: Path, low: int, high: int, kind: str, separators: Sequence[int]) -> Iterator[Block]:
    """The documents of a file of ids one after another; none in an empty one."""
    if not path.stat().st_size:
        return
    ids, start, indexed = _mapped(path, kind)
    if ids.itemsize == 2 and len(ids) > 16 and not ids[1:1 << 16:2].any():
        raise ValueError("every second id is 0, so its ids have four bytes: `dtype` is uint32")

    def begins(low: int, high: int) -> Integers:
        return indexed(low, high) if indexed else np.flatnonzero(among(ids[low - 1:high - 1], separators)) + low

    def following(at: int) -> int:
        """Where the first document begins that begins at `at` or later; the number of ids if none does."""
        for low in range(at, len(ids), BLOCK_IDS):
            if low <= 0:
                return 0
            if len(places := begins(low, low + BLOCK_IDS)):
                return int(places[0])
        return len(ids)

    first, end = (following(-(-(byte - start) // ids.itemsize)) for byte in (low, high))
    while first < end:
        stop = min(end, following(first + BLOCK_IDS))
        if stop - first > MOST_IDS:
            raise ValueError(f"it has a document of more than {stop - first - BLOCK_IDS:,} ids from token {first:,} "
                             f"on, if {separators} separate documents")
        yield ids[first:stop], (indexed(first + 1, stop) - first if indexed else np.empty(0, np.int64))
        first = stop


def _mapped(path: Path, kind: str) -> tuple[Ids, int, Begins | None]:
    """The ids of a file, the byte at which they begin, and the documents by its index."""
    if path.suffix == ".ds":
        return _datatrove(path, kind)
    if path.suffix == ".bin" and path.with_suffix(".idx").is_file():
        return _megatron(path)
    with open(path, "rb") as file:
        head = file.read(12).ljust(12, b"\0")
    if head.startswith(b"\x93NUMPY"):
        array = np.load(path, mmap_mode="r")
        if array.ndim != 1 or array.dtype.kind not in "iu":
            raise ValueError(f"it is an array {array.shape} of {array.dtype}, not a row of ids")
        return array, array.offset, None
    number, version, count = struct.unpack("<3I", head)
    if path.suffix == ".bin" and number // 10_000 == 2024:
        size = LLM_C.get((number, version), 0)
        if not size or path.stat().st_size != LLM_C_HEADER + count * size:
            raise ValueError(f"its header of llm.c has the number {number}, the version {version} and {count:,} ids")
        return np.memmap(path, f"<u{size}", "r", LLM_C_HEADER), LLM_C_HEADER, None
    return np.memmap(path, kind, "r"), 0, None


def _megatron(path: Path) -> tuple[Ids, int, Begins]:
    index = path.with_suffix(".idx")
    with open(index, "rb") as file:
        head = file.read(34).ljust(34, b"\0")
    magic, version, code, sequences, documents = struct.unpack("<9sQBQQ", head)
    if (magic, version) != (b"MMIDIDX\0\0", 1) or code not in MEGATRON or (
            index.stat().st_size != 34 + 12 * sequences + 8 * documents):
        raise ValueError(f"{index.name} is cut, or no index of Megatron's in version 1 of text with whole numbers as "
                         f"ids")
    ids = np.memmap(path, MEGATRON[code], "r")
    lengths, pointers, bounds = (np.memmap(index, number, "r", at, (count,)) for number, at, count in (
        ("<i4", 34, sequences), ("<i8", 34 + 4 * sequences, sequences), ("<i8", 34 + 12 * sequences, documents)))
    if pointers[-1] + lengths[-1] * ids.itemsize != ids.nbytes:
        raise ValueError(f"{index.name} ends elsewhere")

    def begins(low: int, high: int) -> Integers:
        of_sequences = np.searchsorted(pointers, [low * ids.itemsize, high * ids.itemsize])
        return pointers[bounds[slice(*np.searchsorted(bounds, of_sequences))]] // ids.itemsize

    return ids, 0, begins


def _datatrove(path: Path, kind: str) -> tuple[Ids, int, Begins | None]:
    index, about = map(path.with_suffix, (".ds.index", ".ds.metadata"))
    if about.is_file():  # its first line ends with the bytes of an id
        kind = f"<u{int(about.read_text(errors='replace').partition(chr(10))[0].rpartition('|')[2])}"
    ids = np.memmap(path, kind, "r")
    if not index.is_file():
        return ids, 0, None
    ends = np.memmap(index, "<i8", "r")
    if ends[-1] != len(ids):
        raise ValueError(f"{index.name} ends elsewhere")
    return ids, 0, lambda low, high: ends[slice(*np.searchsorted(ends, [low, high]))]


def _rows(path: Path, low: int, high: int, name: str) -> Iterator[Block]:
    """The row groups or record batches that begin in a part of a file, with a document per row."""
    import pyarrow as pa
    import pyarrow.compute as pc
    with map_file(path) as file:
        for place, batches in (_row_groups if path.suffix == ".parquet" else _record_batches)(file, name):
            for batch in batches if low <= place < high else ():
                column = batch.column(name) if name in batch.schema.names else pa.nulls(0)
                if not pa.types.is_integer(getattr(column.type, "value_type", pa.null())):
                    raise ValueError(f"it has no column {name} with lists of ids")
                column.validate(full=True)  # of offsets beyond the data Arrow would make a crash
                ids = column.flatten()
                if column.null_count or ids.null_count:
                    raise ValueError(f"the column {name} has a null")
                lengths = pc.list_value_length(column).cast("int64")
                yield np.from_dlpack(ids), np.cumsum(np.from_dlpack(lengths))


def _row_groups(file: Any, column: str) -> Iterator[tuple[int, Iterable[Any]]]:
    """Where the row groups of a Parquet file lie, about, and their batches."""
    import pyarrow.parquet as pq
    parquet = pq.ParquetFile(file)
    for group in range(parquet.num_row_groups):
        about = parquet.metadata.row_group(group)
        rows = max(1, BLOCK_IDS * about.num_rows // max(1, about.total_byte_size))
        yield file.size() * group // parquet.num_row_groups, parquet.iter_batches(rows, [group], [column])


def _record_batches(file: Any, _column: str) -> Iterator[tuple[int, Iterable[Any]]]:
    """Where the record batches of an Arrow file lie, about, and each."""
    reader, count = arrow_reader(file)
    at = 0
    for number, batch in enumerate(reader if count < 0 else map(reader.get_batch, range(count)), 1):
        yield at, [batch]
        at = file.tell() if count < 0 else file.size() * number // count
