"""Token shards: Arrow IPC files of one record batch, a row a document. Written by encode, read by training.

The layout is Arrow's own, so anything that reads Arrow reads a shard. Training does not need Arrow: the file is
uncompressed and has one batch, so each column is one run of bytes, and the manifest says where it begins. It is read
with `os.pread`, not mapped: a file that is cut or gone on a network disk is then an error, not a SIGBUS.

Where documents begin is looked up in the file, by interpolation and bisection.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal, TypedDict

import numpy as np
from numpy.typing import NDArray

from drover.pipeline.contract.manifest import check_record
from drover.pipeline.core.errors import UserError
from drover.pipeline.core.files import Count, Record, atomic_file, problems_of, refuse_irregular

Ids = NDArray[Any]
"""Ids of tokens: `uint16` or `uint32` where they are stored."""
Integers = NDArray[np.int64]
FORMAT = 1
KEY_BYTES = 16
KEPT = 32_768
"""Most documents of a shard whose offsets are kept in memory while it is open."""
BLOCK = 512
"""Document offsets that are read at once where they are looked up in the file: 4 KiB."""
_FIX = "Run --stage encode again: it makes only what is missing or cut (delete the file first if its size is right)."


class Descriptor:
    """An open file's number; the file is closed when nobody holds this any more, so never while somebody reads."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __del__(self) -> None:
        os.close(self.number)


def open_sized(path: Path, size: int, fix: str) -> Descriptor:
    """A file opened for reading; UserError if that fails, or if it has another size. fix: what the error advises."""
    try:
        file = Descriptor(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK))
        result = refuse_irregular(file.number).st_size
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}. {fix}") from None
    if result != size:
        raise UserError(f"{path} has {result:,} bytes instead of {size:,}. {fix}")
    return file


class TokenShard:
    """One token shard: opened, and compared with its record in size, at the first read, and kept open. Threads may
    share it.

    Attributes:
        path: the file.
        record: its output record in the encode stage's manifest.
        source: name of the documents' source.
        dtype: `uint16` or `uint32`, as stored.
        documents: number of documents.
        token_count: tokens in all, BOS and EOS of each document included.
    """

    def __init__(self, path: Path, record: Record) -> None:
        self.path = path
        self.record = record
        self.source: str = record["source"]
        self.dtype = np.dtype(record["dtype"]).newbyteorder("<")
        self.documents: int = record["docs"]
        self.token_count: int = record["tokens"]

    def tokens(self, start: int, stop: int) -> Ids:
        """A copy of the tokens [start, stop), counted from the shard's first token; dtype as stored."""
        assert 0 <= start <= stop <= self.token_count, f"tokens [{start}, {stop}) of {self.path}"
        return self._read(self.record["data_offset"], self.dtype, start, stop)

    def document_starts(self, start: int, stop: int) -> Integers:
        """The positions within [start, stop) at which documents begin, ascending."""
        if self.documents <= KEPT:
            first, last = self._starts.searchsorted((start, stop))
            return self._starts[first:last]
        at, starts = self._first_from(start)
        while (end := at + len(starts)) < self.documents and (not len(starts) or starts[-1] < stop):
            more = self._read_offsets(end, min(end + max(BLOCK, len(starts)), self.documents))
            starts = self._valid(np.concatenate([starts, more]), start, self.token_count)
        starts = starts[:starts.searchsorted(stop)]
        return starts if len(starts) < 2 else np.unique(starts)

    @cached_property
    def _starts(self) -> NDArray[np.int64]:
        """Where documents begin, ascending; one without tokens begins where the next one does."""
        return np.unique(self.read_offsets()[:-1])

    def document_at(self, position: int) -> int:
        """Number of the document that the token at `position` belongs to."""
        return self._first_from(position + 1)[0] - 1

    def document_span(self, index: int) -> tuple[int, int]:
        """Where a document's tokens begin and end."""
        offsets = self._read_offsets(self._checked(index), index + 2)
        start, stop = self._valid(offsets, 0, self.token_count).tolist()
        return start, stop

    def document_tokens(self, index: int) -> Ids:
        """The tokens of one document, BOS and EOS included."""
        return self.tokens(*self.document_span(index))

    def document_bytes(self, index: int) -> int:
        """Length of the document's original text in UTF-8 bytes."""
        return int(self.text_bytes(self._checked(index), index + 1)[0])

    def text_bytes(self, start: int, stop: int) -> Integers:
        """Lengths of the original texts of documents [start, stop) in UTF-8 bytes."""
        return self._read(self.record["bytes_offset"], np.dtype("<i8"), start, stop)

    def document_key(self, index: int) -> str:
        """The document's key in its text shard: 32 hexadecimal digits."""
        self._checked(index)
        return self.keys(index, index + 1)[0].tobytes().hex()

    def keys(self, start: int, stop: int) -> NDArray[np.void]:
        """The keys of documents [start, stop), 16 bytes each."""
        return self._read(self.record["keys_offset"], np.dtype((np.void, KEY_BYTES)), start, stop)

    def read_offsets(self) -> Integers:
        """Where each document begins, and the end of the last: documents + 1 token positions; read and checked."""
        return self._valid(self._read_offsets(0, self.documents + 1), 0, self.token_count, ends=True)

    def _read_offsets(self, start: int, stop: int) -> Integers:
        if not self.documents:
            return np.zeros(1, np.int64)[start:stop]
        return self._read(self.record["offsets_offset"], np.dtype("<i8"), start, stop)

    def _valid(self, offsets: Integers, least: int, most: int, *, ends: bool = False) -> Integers:
        """The offsets, if they ascend between `least` and `most`, and with `ends` from the one to the other."""
        wrong = len(offsets) and (offsets[0] < least or offsets[-1] > most or (offsets[1:] < offsets[:-1]).any())
        if wrong or (ends and (offsets[0] != least or offsets[-1] != most)):
            raise UserError(f"{self.path} does not hold the {self.documents} documents with {self.token_count} tokens "
                            f"that its manifest lists: its content was changed. {_FIX}")
        return offsets

    def _first_from(self, position: int) -> tuple[int, NDArray[np.int64]]:
        """Number of the first document that begins at `position` or later (how many there are, if none does), and where
        it and some of those behind it begin, as far as this was read.

        The offsets of a shard grow about evenly, so a block around the place where `position` would be then mostly has
        it; where it has not, what is left is narrowed by turns from there and from the middle.
        """
        low, high, (below, above) = 0, self.documents, self._ends.tolist()  # the answer is in [low, high]
        for turn in range(2 * 64):
            if low >= high:
                break
            share = (position - below) / max(1, above - below) if turn % 2 == 0 else 0.5
            at = max(low, min(low + int(share * (high - low)) - BLOCK // 2, high - BLOCK))
            block = self._valid(self._read_offsets(at, min(at + BLOCK, high)), below, above)
            if block[0] >= position:
                high, above = at, int(block[0])
            elif block[-1] < position:
                low, below = at + len(block), int(block[-1])
            else:
                before = int(block.searchsorted(position))
                return at + before, block[before:]
        return low, np.empty(0, np.int64)

    @cached_property
    def _ends(self) -> Integers:
        """The first offset and the last; read once, and checked to be 0 and the end of all tokens."""
        ends = np.concatenate([self._read_offsets(0, 1), self._read_offsets(self.documents, self.documents + 1)])
        return self._valid(ends, 0, self.token_count, ends=True)

    @cached_property
    def _file(self) -> Descriptor:
        return open_sized(self.path, self.record["bytes"], _FIX)

    def _read(self, offset: int, dtype: np.dtype[Any], start: int, stop: int) -> NDArray[Any]:
        """Items [start, stop) of the column that begins at byte `offset`."""
        file = self._file
        at = offset + start * dtype.itemsize
        if offset + stop * dtype.itemsize > self.record["bytes"]:
            raise UserError(f"{self.path} is too small for the documents that its manifest lists. {_FIX}")
        values = np.empty(stop - start, dtype)
        done = os.preadv(file.number, [values.data], at) if len(values) else 0
        if done == values.nbytes:
            return values
        view = values.view(np.uint8).data
        while done < len(view):  # Linux reads at most 2 GB at once
            read = os.preadv(file.number, [view[done:]], at + done)
            if read == 0:
                raise UserError(f"{self.path} ends at byte {at + done}, within its tokens: it was cut after training "
                                f"began. {_FIX}")
            done += read
        return values

    def _checked(self, index: int) -> int:
        assert 0 <= index < self.documents, f"document {index} of {self.path}"
        return index


def write_shard(path: Path, tokens: Ids, offsets: Integers, text_bytes: Sequence[int],
                keys: Sequence[str], *, metadata: dict[str, str]) -> Record:
    """Write documents as a shard that appears whole or not at all; equal documents give equal bytes.

    Args:
        tokens: ids of all documents one after another, with BOS and EOS; stored as they are, `uint16` or
            `uint32`.
        offsets: where each document begins, and the end of the last: documents + 1.
        text_bytes: UTF-8 bytes of each document's text.
        keys: key of each document, 32 hexadecimal digits.
        metadata: what the ids mean; kept in the file's schema with the format's version.

    Returns:
        What the output record says of the content: docs, tokens, text_bytes, dtype and the columns' byte offsets.
    """
    import pyarrow as pa
    dtype, names = tokens.dtype.name, np.frombuffer(bytes.fromhex("".join(keys)), np.uint8)
    assert len(names) == KEY_BYTES * len(keys), f"keys of {path}"

    def column(values: NDArray[Any], kind: Any, count: int) -> Any:
        # Of its buffer: `pa.array` would import pandas, to see whether this is one of its own.
        return pa.Array.from_buffers(kind, count, [None, pa.py_buffer(np.ascontiguousarray(values))])
    ids = pa.from_numpy_dtype(dtype)
    starts = column(np.asarray(offsets, np.int64), pa.int64(), len(offsets))
    flat = column(tokens, ids, len(tokens))
    columns = [pa.LargeListArray.from_arrays(starts, flat),
               column(np.asarray(text_bytes, np.int64), pa.int64(), len(text_bytes)),
               column(names, pa.binary(KEY_BYTES), len(keys))]
    schema = pa.schema([pa.field("tokens", pa.large_list(pa.field("item", ids))), pa.field("bytes", pa.int64()),
                        pa.field("key", pa.binary(KEY_BYTES))],
                       metadata={"format": str(FORMAT), "dtype": dtype, **metadata})
    batch = pa.record_batch(columns, schema=schema)
    with atomic_file(path, keep_equal=True) as file, pa.ipc.new_file(file, schema) as writer:
        writer.write_batch(batch)
    return {"docs": len(keys), "tokens": len(tokens), "text_bytes": int(sum(text_bytes)), "dtype": dtype,
            **column_offsets(path)}


def read_batch(path: Path) -> Any:
    """The shard's `pyarrow.RecordBatch`, mapped; UserError if the file is damaged or not a token shard."""
    import pyarrow as pa
    try:
        if not path.is_file():
            raise OSError("it is no file")  # a pipe would be waited for
        reader = pa.ipc.open_file(pa.memory_map(str(path)))
        if reader.num_record_batches != 1 or reader.schema.names != ["tokens", "bytes", "key"]:
            raise pa.ArrowInvalid(f"{reader.num_record_batches} record batches of {reader.schema.names}")
        batch = reader.get_batch(0)
        batch.validate(full=True)
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is damaged or not a token shard ({error}). {_FIX}") from None
    return batch


def column_offsets(path: Path) -> dict[str, int]:
    """What an output record says of where the columns are, as byte offsets in the file: buffers of a mapped batch point
    into the mapping."""
    import pyarrow as pa
    mapped = pa.memory_map(str(path))
    base = mapped.read_buffer().address
    batch = pa.ipc.open_file(mapped).get_batch(0)
    lists, text_bytes, keys = (batch.column(index).buffers() for index in range(3))
    buffers = {"data_offset": lists[3], "offsets_offset": lists[1], "bytes_offset": text_bytes[1],
               "keys_offset": keys[1]}
    return {name: buffer.address - base if buffer is not None and buffer.size else 0
            for name, buffer in buffers.items()}


NUMBERS = ("bytes", "docs", "tokens", "data_offset", "offsets_offset", "bytes_offset", "keys_offset")
"""Fields of an output record that are whole numbers, in the order of the columns."""
MOST_OPEN = 1024
"""Shards that are kept open; fewer where a process may have fewer files (`most_open`)."""


def is_sha256(text: str) -> None:
    """ValueError unless this is a hash in hexadecimal digits."""
    if len(bytes.fromhex(text)) != 32:
        raise ValueError(f"{text[:70]!r} is no sha256")


class TokenRecord(TypedDict):
    """What of a shard's output record is read by."""

    path: str
    sha256: Annotated[str, is_sha256]
    split: str
    source: str
    dtype: Literal["uint16", "uint32"]
    bytes: Count
    docs: Count
    tokens: Count
    data_offset: Count
    offsets_offset: Count
    bytes_offset: Count
    keys_offset: Count


@dataclass(frozen=True)
class ShardTable:
    """The records of token shards, a row each, in the order in which the manifest has them.

    Attributes:
        numbers: (shards, 7) int64, `NUMBERS`.
        sha256: (shards, 32) uint8.
        paths: where each is inside the stage's folder.
        kind: (shards,) the row of `kinds`: what many shards share, (split, source, dtype).
    """

    numbers: Integers
    sha256: NDArray[np.uint8]
    paths: list[str]
    kind: NDArray[np.int32]
    kinds: tuple[tuple[str, str, str], ...]

    @classmethod
    def of(cls, records: Sequence[Record]) -> ShardTable:
        """The output records of an encode stage as columns; UserError if one is damaged."""
        for record in records:
            check_record(record, TokenRecord, "encode")
        numbers = np.array([[record[name] for name in NUMBERS] for record in records], np.int64)
        numbers = numbers.reshape(-1, len(NUMBERS))
        digests = np.frombuffer(bytes.fromhex("".join(record["sha256"] for record in records)), np.uint8)
        shared = [(record["split"], record["source"], record["dtype"]) for record in records]
        kinds = {kind: number for number, kind in enumerate(dict.fromkeys(shared))}
        return cls(numbers, digests.reshape(-1, 32), [record["path"] for record in records],
                   np.array([kinds[kind] for kind in shared], np.int32), tuple(kinds))

    def __len__(self) -> int:
        return len(self.numbers)

    def digest(self, row: int) -> str:
        """Hex sha256 of the shard's file."""
        return self.sha256[row].tobytes().hex()

    def record(self, row: int) -> Record:
        """What the manifest says of a shard, as far as reading it needs that."""
        split, source, dtype = self.kinds[self.kind[row]]
        return {"path": self.paths[row], "sha256": self.digest(row), "split": split, "source": source, "dtype": dtype,
                **dict(zip(NUMBERS, self.numbers[row].tolist(), strict=True))}

    def rows(self, split: str, source: str | None = None) -> Integers:
        """The shards of one split (and source), in the order of their paths."""
        chosen = np.array([kind[0] == split and source in (None, kind[1]) for kind in self.kinds], bool)
        result = np.flatnonzero(chosen[self.kind]).tolist()
        return np.array(sorted(result, key=self.paths.__getitem__), np.int64)

    def content(self, split: str) -> list[list[str]]:
        """(path, sha256) of each shard of a split, in the manifest's order: what identifies the tokens."""
        chosen = [kind[0] == split for kind in self.kinds]
        digests = self.sha256.tobytes()
        return [[path, digests[32 * row:32 * row + 32].hex()]
                for row, (path, kind) in enumerate(zip(self.paths, self.kind.tolist(), strict=True)) if chosen[kind]]


def most_open() -> int:
    """Shards that may be open at once: a quarter of the files that this process may have, `MOST_OPEN` at most."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MOST_OPEN if soft == resource.RLIM_INFINITY else max(1, min(MOST_OPEN, soft // 4))


class OpenShards:
    """The shards of a table that were read last. Threads may share it.

    A shard that is forgotten while another thread reads it closes its file when that thread is done with it.

    Attributes:
        shard: gives the shard in a row of the table.
    """

    def __init__(self, table: ShardTable, folder: Path) -> None:
        self.table = table
        self.shard = lru_cache(most_open())(lambda row: TokenShard(folder / table.paths[row], table.record(row)))


class Shards(Sequence[TokenShard]):
    """Some shards of a table, in order.

    Attributes:
        token_counts: (shards,) int64.
    """

    def __init__(self, opened: OpenShards, rows: Integers) -> None:
        self.opened = opened
        self.rows = rows
        self.token_counts: Integers = opened.table.numbers[rows, NUMBERS.index("tokens")]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: Any) -> Any:
        return self.opened.shard(int(self.rows[index]))


def joined(parts: Sequence[Shards]) -> Shards:
    """Shards of one table, open together, one after another."""
    return Shards(parts[0].opened, np.concatenate([part.rows for part in parts]))


def open_shards(table: ShardTable, split: str, sources: Iterable[str], folder: Path) -> dict[str, Shards]:
    """The shards of a split by source, in the order of their paths, which are open together: all sources share what may
    be open. No file is touched before it is read."""
    opened = OpenShards(table, folder)
    return {source: Shards(opened, table.rows(split, source)) for source in sources}


def size_problems(folder: Path, table: ShardTable, rows: Iterable[int]) -> list[str]:
    """A sentence for each of these shards whose file is missing or has another size: one stat a shard."""
    return [f"{problem}. {_FIX}" for problem in problems_of(folder, map(table.record, rows)) if problem]


_CANDIDATE = np.dtype([("key", "S16"), ("shard", "i8"), ("place", "i8"), ("length", "i8")])
"""A document that may be measured: its key, where it is, its tokens."""


@dataclass(frozen=True)
class Chosen:
    """The documents of one source to measure on, in the order in which they lie in the shards.

    Attributes:
        shards, places: (documents,) each: in which token shard of the source one lies, and its number in it.
        lengths: tokens of each, BOS and EOS with them.
        text_bytes: UTF-8 bytes of the original text of each.
        of_documents, of_tokens: how many the source has in all.
    """

    shards: np.ndarray
    places: np.ndarray
    lengths: np.ndarray
    text_bytes: np.ndarray
    of_documents: int
    of_tokens: int

    def __len__(self) -> int:
        return len(self.places)


def choose(shards: Sequence[TokenShard], tokens: int | None) -> Chosen:
    """Documents of a source until they have `tokens` tokens (None: all); at least one, if there is any.

    They are taken in the order of their keys, which are hashes of the text. So the same documents are measured
    everywhere, and no part of the corpus is favoured. Shards are read one by one; only documents that may still be
    chosen are kept in memory.
    """
    taken = np.empty(0, _CANDIDATE)
    of_documents = 0
    of_tokens = 0
    for number, shard in enumerate(shards):
        candidates = np.empty(shard.documents, _CANDIDATE)
        candidates["shard"], candidates["place"] = number, np.arange(shard.documents)
        candidates["length"] = np.diff(shard.read_offsets())
        of_documents, of_tokens = of_documents + shard.documents, of_tokens + shard.token_count
        if tokens is not None:
            candidates["key"] = shard.keys(0, shard.documents).view("S16")
        taken = np.concatenate([taken, candidates])
        if tokens is not None:
            taken = taken[np.argsort(taken["key"], kind="stable")]
            taken = taken[np.cumsum(taken["length"]) - taken["length"] < tokens]
    taken = taken[np.lexsort((taken["place"], taken["shard"]))]
    text_bytes = [shards[one["shard"]].document_bytes(int(one["place"])) for one in taken]
    return Chosen(taken["shard"], taken["place"], taken["length"], np.asarray(text_bytes, np.int64), of_documents,
                  of_tokens)


class ChosenDocuments(Sequence[np.ndarray]):
    """The ids of chosen documents. Each is read from its shard on access; only the last one stays in memory."""

    def __init__(self, shards: Sequence[TokenShard], chosen: Chosen) -> None:
        self._shards = shards
        self._chosen = chosen
        self._last: tuple[int, np.ndarray] | None = None

    def __len__(self) -> int:
        return len(self._chosen)

    def __getitem__(self, number: Any) -> Any:
        """The document of this number, from BOS to EOS."""
        if self._last is None or self._last[0] != number:  # windows of a long document follow each other
            shard = self._shards[self._chosen.shards[number]]
            self._last = number, shard.document_tokens(int(self._chosen.places[number]))
        return self._last[1]
