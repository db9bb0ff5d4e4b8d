"""Token shards: Arrow IPC files of one record batch, a row a document. Written by encode, read by training.

The layout is Arrow's own, so anything that reads Arrow reads a shard. Training does not need Arrow: the file is
uncompressed and has one batch, so each column is one run of bytes, and the manifest says where it begins. It is read
with `os.pread`, not mapped: a file that is cut or gone on a network disk is then an error, not a SIGBUS.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from pipeline.errors import UserError
from pipeline.files import atomic_file

FORMAT = 1
KEY_BYTES = 16
_MEND = "Run --stage encode again: it makes only what is missing or cut (delete the file first if its size is right)."


class TokenShard:
    """One token shard, opened at the first read and kept open.

    Attributes:
        path: the file.
        record: its output record in the encode stage's manifest.
        source: name of the documents' source.
        dtype: `uint16` or `uint32`, as stored.
        documents: number of documents.
        token_count: tokens in all, BOS and EOS of each document included.
    """

    def __init__(self, path: Path, record: dict[str, Any]) -> None:
        """Check that the file is there at its full length; UserError otherwise."""
        self.path, self.record = path, record
        self.source: str = record["source"]
        self.dtype = np.dtype(record["dtype"]).newbyteorder("<")
        self.documents: int = record["docs"]
        self.token_count: int = record["tokens"]
        try:
            size = path.stat().st_size
        except OSError as error:
            raise UserError(f"{path} cannot be read: {error.strerror}. {_MEND}") from None
        if size != record["bytes"]:
            raise UserError(f"{path} is torn: it has {size} bytes instead of {record['bytes']}. {_MEND}")

    def __reduce__(self) -> tuple[type[TokenShard], tuple[Path, dict[str, Any]]]:
        return TokenShard, (self.path, self.record)  # a loader's worker process opens the file for itself

    def tokens(self, start: int, stop: int) -> NDArray[Any]:
        """A copy of the tokens [start, stop), counted from the shard's first token; dtype as stored."""
        if not 0 <= start <= stop <= self.token_count:
            raise IndexError(f"tokens [{start}, {stop}) of {self.path}, which has {self.token_count}")
        return self._read(self.record["data_offset"], self.dtype, start, stop)

    def document_starts(self, start: int, stop: int) -> NDArray[np.int64]:
        """The positions within [start, stop) at which documents begin, ascending."""
        first, last = np.searchsorted(self.offsets[:-1], [start, stop])
        return np.unique(self.offsets[first:last])  # a document without tokens begins where the next one does

    def document_tokens(self, index: int) -> NDArray[Any]:
        """The tokens of one document, BOS and EOS included."""
        start, stop = self.offsets[self._checked(index):index + 2]
        return self.tokens(int(start), int(stop))

    def document_bytes(self, index: int) -> int:
        """Length of the document's original text in UTF-8 bytes."""
        return int(self._read(self.record["bytes_offset"], np.dtype("<i8"), self._checked(index), index + 1)[0])

    def document_key(self, index: int) -> str:
        """The document's key in its text shard: 32 hexadecimal digits."""
        return self._read(self.record["keys_offset"], np.dtype((np.void, KEY_BYTES)), self._checked(index),
                          index + 1)[0].tobytes().hex()

    def document_keys(self) -> NDArray[np.uint64]:
        """The keys of all documents, (documents, 2): each as two numbers that sort as its hexadecimal digits do."""
        return self._read(self.record["keys_offset"], np.dtype(">u8"), 0, 2 * self.documents).astype(
            np.uint64).reshape(-1, 2)

    @cached_property
    def offsets(self) -> NDArray[np.int64]:
        """Where each document begins, and the end of the last: documents + 1 token positions. Read once."""
        offsets = self._read(self.record["offsets_offset"], np.dtype("<i8"), 0, self.documents + 1) \
            if self.documents else np.zeros(1, np.int64)
        if offsets[0] != 0 or offsets[-1] != self.token_count or (np.diff(offsets) < 0).any():
            raise UserError(f"{self.path} does not hold the {self.documents} documents with {self.token_count} tokens "
                            f"that its manifest speaks of: its content was changed. {_MEND}")
        return offsets

    @cached_property
    def _file(self) -> IO[bytes]:
        try:
            return open(self.path, "rb", buffering=0)
        except OSError as error:
            if error.errno == errno.EMFILE:
                raise UserError(f"{self.path} cannot be opened: this process may have no more open files. Raise the "
                                f"hard limit (ulimit -Hn), or make fewer, larger shards (shard.shard_mb).") from None
            raise UserError(f"{self.path} cannot be opened: {error.strerror}. {_MEND}") from None

    def _read(self, offset: int, dtype: np.dtype[Any], start: int, stop: int) -> NDArray[Any]:
        """Items [start, stop) of the column that begins at byte `offset`."""
        values = np.empty(stop - start, dtype)
        view, at = memoryview(values.view(np.uint8).data).cast("B"), offset + start * dtype.itemsize
        done = 0
        while done < len(view):  # Linux reads at most 2 GB at once
            read = os.preadv(self._file.fileno(), [view[done:]], at + done)
            if read == 0:
                raise UserError(f"{self.path} ends at byte {at + done}, within its tokens: it was cut after training "
                                f"began. {_MEND}")
            done += read
        return values

    def _checked(self, index: int) -> int:
        if not 0 <= index < self.documents:
            raise IndexError(f"document {index} of {self.path}, which has {self.documents}")
        return index


def open_shards(folder: Path, outputs: list[dict[str, Any]], split: str, source: str | None = None) -> list[TokenShard]:
    """The shards of one split (and source) among a manifest's outputs, in the order of their paths."""
    return [TokenShard(folder / record["path"], record) for record in sorted(outputs, key=lambda item: item["path"])
            if record.get("split") == split and source in (None, record["source"])]


def write_shard(path: Path, tokens: Sequence[NDArray[Any]], text_bytes: Sequence[int], keys: Sequence[str], *,
                dtype: str, metadata: dict[str, str]) -> dict[str, Any]:
    """Write documents as a shard that appears whole or not at all; equal documents give equal bytes.

    Args:
        tokens: ids of each document, with BOS and EOS.
        text_bytes: UTF-8 bytes of each document's text.
        keys: key of each document, 32 hexadecimal digits.
        dtype: `uint16` or `uint32`.
        metadata: what the ids mean; kept in the file's schema beside the format's version.

    Returns:
        What the output record says of the content: docs, tokens, text_bytes, dtype and the columns' byte offsets.
    """
    import pyarrow as pa
    offsets = np.concatenate([[0], np.cumsum([len(ids) for ids in tokens], dtype=np.int64)]).astype(np.int64)
    values = np.concatenate([np.asarray(ids, dtype) for ids in tokens]) if tokens else np.empty(0, dtype)
    columns = [pa.LargeListArray.from_arrays(pa.array(offsets), pa.array(values)),
               pa.array(np.asarray(text_bytes, np.int64)),
               pa.array([bytes.fromhex(key) for key in keys], pa.binary(KEY_BYTES))]
    schema = pa.schema([pa.field("tokens", pa.large_list(pa.field("item", pa.from_numpy_dtype(dtype)))),
                        pa.field("bytes", pa.int64()), pa.field("key", pa.binary(KEY_BYTES))],
                       metadata={"format": str(FORMAT), "dtype": dtype, **metadata})
    batch = pa.record_batch([column.cast(field.type) for column, field in zip(columns, schema, strict=True)],
                            schema=schema)
    with atomic_file(path) as file, pa.ipc.new_file(file, schema) as writer:
        writer.write_batch(batch)
    return {"docs": len(tokens), "tokens": len(values), "text_bytes": int(sum(text_bytes)), "dtype": dtype,
            **_column_offsets(path)}


def read_batch(path: Path) -> Any:
    """The shard's `pyarrow.RecordBatch`, mapped; UserError if the file is torn or not a token shard."""
    import pyarrow as pa
    try:
        reader = pa.ipc.open_file(pa.memory_map(str(path)))
        if reader.num_record_batches != 1 or reader.schema.names != ["tokens", "bytes", "key"]:
            raise pa.ArrowInvalid(f"{reader.num_record_batches} record batches of {reader.schema.names}")
        batch = reader.get_batch(0)
        batch.validate(full=True)
    except (pa.ArrowInvalid, OSError) as error:
        raise UserError(f"{path} is torn or not a token shard ({error}). {_MEND}") from None
    return batch


def _column_offsets(path: Path) -> dict[str, int]:
    """Byte offsets of the columns in the file: buffers of a mapped batch point into the mapping."""
    import pyarrow as pa
    mapped = pa.memory_map(str(path))
    base = mapped.read_buffer().address
    batch = pa.ipc.open_file(mapped).get_batch(0)
    lists, text_bytes, keys = (batch.column(index).buffers() for index in range(3))
    buffers = {"data_offset": lists[3], "offsets_offset": lists[1], "bytes_offset": text_bytes[1],
               "keys_offset": keys[1]}
    return {name: buffer.address - base if buffer is not None and buffer.size else 0
            for name, buffer in buffers.items()}
