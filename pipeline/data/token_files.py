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

import re
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from drover.pipeline.core.errors import UserError
from drover.pipeline.data.streams import arrow_reader, map_file

BLOCK_IDS = 1 << 22
"""Ids that are in memory at once, unless one document has more."""
MOST_IDS = 1 << 27
"""A longer document is refused: files of a tokenizer with another EOS would be one."""
MEGATRON = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
"""Types of ids by the codes of Megatron's index."""
LLM_C = {20240520: (1, "<u2"), 20240801: (7, "<u4")}
"""Version and type of ids by the number with which llm.c's files begin: GPT-2's and Llama 3's."""
LLM_C_HEADER = 1024
NUMPY = b"\x93NUMPY"


@dataclass(frozen=True)
class TokenBlock:
    """Whole documents of a file.

    Attributes:
        ids: of all of them, one after another.
        borders: positions in it where the format has a document end, ascending; the end of the block among them.
        first: number of the first id in the file, or of the first row.
        rows: whether `first` is a row, and each border the end of one.
    """

    ids: NDArray[Any]
    borders: NDArray[np.int64]
    first: int
    rows: bool = False

    def refuse_beyond(self, path: str, vocabulary: int) -> None:
        """UserError if an id is not among the so many of the vocabulary."""
        ids = self.ids
        if not len(ids) or (ids.min() >= 0 and ids.max() < vocabulary):
            return
        at = int(np.flatnonzero((ids < 0) | (ids >= vocabulary))[0])
        place = f"row {self.first + int(np.searchsorted(self.borders, at, 'right')):,}" if self.rows else \
            f"token {self.first + at:,}"
        raise UserError(f"{path} has the id {ids[at]} at {place} (from 0), but the vocabulary of tokenizer.path has "
                        f"{vocabulary:,} ids. The file was made with another tokenizer, or its ids are not "
                        f"{ids.dtype.name}: correct tokenizer.path, or the source's `dtype`.")

    def documents(self, separators: Sequence[int]) -> tuple[NDArray[Any], NDArray[np.int64]]:
        """The ids without separators, and how many each document has. What has no ids is no document."""
        is_separator = among(self.ids, separators)
        at = np.flatnonzero(is_separator)
        begins = np.sort(np.concatenate([[0], at + 1, self.borders]), kind="stable")
        ends = np.sort(np.concatenate([at, self.borders, [len(self.ids)]]), kind="stable")
        lengths = ends - begins
        return self.ids[~is_separator], lengths[lengths > 0]


@dataclass(frozen=True)
class Borders:
    """Where the index of a format has documents end or begin, as token positions `positions[documents] / unit`.

    positions: ascending. documents: which of them; None for all.
    """

    positions: NDArray[Any]
    unit: int = 1
    documents: NDArray[Any] | None = None

    def __call__(self, low: int, high: int | None = None) -> NDArray[np.int64]:
        """Those from `low` on below `high`; of None, the first."""
        start = self._number(low)
        stop = start + 1 if high is None else self._number(high)
        chosen = self.positions[start:stop] if self.documents is None else self.positions[self.documents[start:stop]]
        return (chosen // self.unit).astype(np.int64)

    def _number(self, at: int) -> int:
        number = np.searchsorted(self.positions, self.positions.dtype.type(at * self.unit))
        return int(number if self.documents is None else np.searchsorted(self.documents, number))


@dataclass(frozen=True)
class FlatFile:
    """Ids one after another, mapped, which begin at byte `start`. borders: None if only separators end documents."""

    path: Path
    ids: NDArray[Any]
    start: int
    borders: Borders | None = None

    def blocks(self, low: int, high: int, separators: Sequence[int]) -> Iterator[TokenBlock]:
        """The documents that begin in the bytes [low, high) of the file."""
        first, end = (self._following(-(-(byte - self.start) // self.ids.itemsize), separators) for byte in (low, high))
        while first < end:
            stop = min(end, self._following(first + BLOCK_IDS, separators))
            if stop - first > MOST_IDS:
                raise UserError(f"{self.path} has a document of more than {stop - first - BLOCK_IDS:,} ids from token "
                                f"{first:,} on, if {separators} separate documents. Name the id that does, as the "
                                f"source's `separators`.")
            borders = np.empty(0, np.int64) if self.borders is None else np.append(
                self.borders(first + 1, stop), stop) - first
            yield TokenBlock(self.ids[first:stop], borders, first)
            first = stop

    def _following(self, at: int, separators: Sequence[int]) -> int:
        """Where the first document begins that begins at `at` or later; the number of ids if none does."""
        if at <= 0 or at >= len(self.ids):
            return max(0, min(at, len(self.ids)))
        if self.borders is not None:
            return min([*self.borders(at).tolist(), len(self.ids)])
        for low in range(at - 1, len(self.ids), BLOCK_IDS):
            places = np.flatnonzero(among(self.ids[low:low + BLOCK_IDS], separators))
            if len(places):
                return low + int(places[0]) + 1
        return len(self.ids)


@dataclass(frozen=True)
class ColumnFile:
    """A column of a Parquet or Arrow file: lists of ids, a document per row."""

    path: Path
    column: str

    def check(self) -> None:
        """UserError unless the file has the column, and it holds lists of whole numbers."""
        import pyarrow.parquet as pq
        with _columns(self.path) as file:
            schema = pq.read_schema(file) if self.path.suffix == ".parquet" else arrow_reader(file)[0].schema
        columns = {field.name: str(field.type) for field in schema}
        if not re.search(r"list<\w+: u?int\d+( not null)?>", columns.get(self.column, "")):
            raise UserError(f"{self.path} has no column {self.column} with lists of ids; its columns are {columns}. "
                            f"Correct the source's `column`.")

    def blocks(self, low: int, high: int, separators: Sequence[int]) -> Iterator[TokenBlock]:
        """The rows of the row groups or record batches that begin in the bytes [low, high) of the file."""
        import pyarrow.compute as pc
        with _columns(self.path) as file:
            for first, batch in self._batches(file, low, high):
                column = batch.column(self.column)
                column.validate(full=True)  # of offsets beyond the data Arrow would make a crash
                ids = column.flatten()
                if column.null_count or ids.null_count:
                    raise UserError(f"{self.path}: the column {self.column} has a null in the {len(column):,} rows "
                                    f"from row {first:,} on. Leave these rows out.")
                lengths = pc.list_value_length(column).cast("int64")
                yield TokenBlock(np.from_dlpack(ids), np.cumsum(np.from_dlpack(lengths)), first, rows=True)

    def _batches(self, file: Any, low: int, high: int) -> Iterator[tuple[int, Any]]:
        """Record batches, and the number of the first row of each."""
        import pyarrow.parquet as pq
        size = file.size()
        first = at = 0
        if self.path.suffix == ".arrow":
            reader, count = arrow_reader(file)
            for number, batch in enumerate(reader if count < 0 else map(reader.get_batch, range(count)), 1):
                if low <= at < high:
                    yield first, batch
                at = file.tell() if count < 0 else size * number // count
                first += batch.num_rows
            return
        parquet = pq.ParquetFile(file)
        for group in range(parquet.num_row_groups):
            about = parquet.metadata.row_group(group)
            if low <= size * group // parquet.num_row_groups < high:
                at = first
                for batch in parquet.iter_batches(max(1, BLOCK_IDS * about.num_rows // max(1, about.total_byte_size)),
                                                  row_groups=[group], columns=[self.column]):
                    yield at, batch
                    at += batch.num_rows
            first += about.num_rows


@contextmanager
def _columns(path: Path) -> Iterator[Any]:
    """A mapped file; UserError for what Arrow raises of a damaged one."""
    import pyarrow as pa
    try:
        with map_file(path) as file:
            yield file
    except (pa.ArrowException, OSError, ValueError) as error:
        raise UserError(f"{path} is damaged or in another format than its name says: {error}. Copy it again from where "
                        f"it was made.") from None


def among(ids: NDArray[Any], separators: Sequence[int]) -> NDArray[np.bool_]:
    """Which of the ids are separators."""
    return reduce(np.logical_or, (ids == separator for separator in separators))


def opened(path: Path, kind: str, column: str) -> FlatFile | ColumnFile:
    """A file of tokens by its ending and its first bytes. kind: the type of ids if the file does not say it.

    Raises:
        UserError: it is cut, damaged, or in another format.
    """
    if path.suffix in (".parquet", ".arrow"):
        columns = ColumnFile(path, column)
        columns.check()
        return columns
    with open(path, "rb") as file:
        head = file.read(12)
    start = 0
    borders = None
    number, version, count = struct.unpack("<3I", head.ljust(12, b"\0"))
    if path.suffix == ".ds":
        kind, borders = _datatrove(path, kind)
    elif path.with_suffix(".idx").is_file():
        kind, borders = _megatron(path)
    elif head.startswith(NUMPY):
        try:
            array = np.load(path, mmap_mode="r")
        except ValueError as error:
            raise _damaged(path, str(error)) from None
        if array.ndim != 1 or array.dtype.kind not in "iu":
            raise UserError(f"{path} is an array {array.shape} of {array.dtype}, not a row of ids. Save its rows one "
                            f"after another, with EOS between documents.")
        return FlatFile(path, array, array.offset)
    elif path.suffix == ".bin" and 20240000 < number < 20250000:
        if number not in LLM_C or LLM_C[number][0] != version:
            raise UserError(f"{path} begins with {number} and version {version}, which is no training data of llm.c "
                            f"that Drover knows: {LLM_C}.")
        kind = LLM_C[number][1]
        start = LLM_C_HEADER
        if path.stat().st_size != start + count * np.dtype(kind).itemsize:
            raise _damaged(path, f"its header has {count:,} ids")
    ids = _mapped(path, kind, start)
    if ids.itemsize == 2 and len(ids) > 16 and not ids[1:1 << 16:2].any():
        raise UserError(f"Every second id of {path} is 0: its ids have four bytes. Set the source's `dtype` to uint32.")
    return FlatFile(path, ids, start, borders)


def _megatron(path: Path) -> tuple[str, Borders]:
    """The type of ids and the documents of a .bin, by its .idx."""
    index = path.with_suffix(".idx")
    with open(index, "rb") as file:
        head = file.read(34)
    magic, version, code, sequences, documents = struct.unpack("<9sQBQQ", head.ljust(34, b"\0"))
    if magic != b"MMIDIDX\0\0" or version != 1 or code not in MEGATRON:
        raise UserError(f"{index} is no index of Megatron's in version 1 with whole numbers as ids: it begins with "
                        f"{head[:20]!r}. If {path.name} is not Megatron's, move one of the two away.")
    size = 34 + 12 * sequences + 8 * documents
    left = index.stat().st_size
    if left == size + sequences > size:
        raise UserError(f"{index} is of a multimodal data set, which has more than text. Drover does not read it.")
    if left != size:
        raise _damaged(index, f"its header has {sequences:,} sequences and {documents:,} borders of documents")
    lengths, pointers, bounds = (_mapped(index, kind, at, count) for kind, at, count in (
        ("<i4", 34, sequences), ("<i8", 34 + 4 * sequences, sequences), ("<i8", 34 + 12 * sequences, documents)))
    unit = np.dtype(MEGATRON[code]).itemsize
    if (pointers[-1] + lengths[-1] * unit if sequences else 0) != path.stat().st_size:
        raise _damaged(path, f"the end of its last sequence is elsewhere in {index.name}")
    inside = bounds[:np.searchsorted(bounds, sequences)]
    return MEGATRON[code], Borders(pointers, unit, inside)


def _datatrove(path: Path, kind: str) -> tuple[str, Borders | None]:
    """The type of ids and the documents of a .ds, by the files that belong to it."""
    index, about = map(path.with_suffix, (".ds.index", ".ds.metadata"))
    if about.is_file():
        size = about.read_text(errors="replace").partition("\n")[0].rpartition("|")[2].strip()
        if size not in ("2", "4"):
            raise _damaged(about, f"its first line ends with {size!r:.20}, not the 2 or 4 bytes of an id")
        kind = f"<u{size}"
    if not index.is_file():
        return kind, None
    ends = _mapped(index, "<u8", 0)
    if (int(ends[-1]) if len(ends) else 0) * np.dtype(kind).itemsize != path.stat().st_size:
        raise _damaged(path, f"{index.name} ends elsewhere")
    return kind, Borders(ends)


def _mapped(path: Path, kind: str, start: int, count: int | None = None) -> NDArray[Any]:
    """The numbers of a type from byte `start` on; UserError if the file ends within one."""
    size = path.stat().st_size - start
    dtype = np.dtype(kind)
    if count is None and size % dtype.itemsize:
        raise _damaged(path, f"it ends within a number of {dtype.itemsize} bytes")
    count = size // dtype.itemsize if count is None else count
    return np.memmap(path, dtype, "r", start, (count,)) if count else np.empty(0, dtype)


def _damaged(path: Path, why: str) -> UserError:
    return UserError(f"{path} has {path.stat().st_size:,} bytes, but {why}. It is cut or not what its name says: copy "
                     f"it again, or correct the source's `paths` or `dtype`.")
