"""Token shards as Megatron Core's SOURCE.bin and SOURCE.idx, or as SOURCE.parquet."""

from __future__ import annotations

import hashlib
import io
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from drover.pipeline.contract.inputs import output, refuse_changed
from drover.pipeline.contract.run import Run
from drover.pipeline.core.console import ProgressBar, counted, echo
from drover.pipeline.core.errors import UserError
from drover.pipeline.core.files import Outputs, Record
from drover.pipeline.data.counts import total
from drover.pipeline.data.token_shards import TokenShard
from drover.pipeline.tokenization.files import vocabulary_record
from drover.tools.draft import Draft

MANIFEST = "export.json"
BLOCK_TOKENS = 1 << 22
"""Tokens in memory at once, unless one document has more."""
CODES = {"uint16": 8, "int32": 4}
"""Megatron's codes for the types of ids."""


@dataclass(frozen=True)
class Export:
    """The token shards to export.

    Attributes:
        folder: of the stage encode.
        shards: output records in the order of training, by source.
        dtype: of the exported ids, little-endian. Megatron has no code for unsigned ids of four bytes.
        without_bos: leave out the first id of each document.
    """

    folder: Path
    shards: dict[str, Outputs]
    dtype: np.dtype
    without_bos: bool

    def files(self, form: str) -> dict[str, Callable[[], Iterator[bytes]]]:
        """The content of each file of a format, in chunks. In Megatron Core's a document is one sequence."""
        contents = {"bin": self._ids, "idx": self._index} if form == "megatron" else {"parquet": self._rows}
        return {f"{name}.{ending}": partial(content, records) for name, records in self.shards.items()
                for ending, content in contents.items()}

    def _documents(self, records: Outputs) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """The ids of some documents, and where each begins and the last ends."""
        for record in records:
            path = self.folder / record["path"]
            refuse_changed(output(self.folder, record, "encode"))
            shard, first = TokenShard(path, record), 0
            offsets = shard.read_offsets()
            while first < shard.documents:
                stop = max(first + 1, int(np.searchsorted(offsets, offsets[first] + BLOCK_TOKENS, "right")) - 1)
                ids = shard.tokens(int(offsets[first]), int(offsets[stop]))
                places = offsets[first:stop + 1] - offsets[first]
                if self.without_bos:
                    ids = np.delete(ids, places[:-1])
                    places = places - np.arange(len(places))
                yield ids.astype(self.dtype), places
                first = stop

    def _ids(self, records: Outputs) -> Iterator[bytes]:
        """The ids of all documents."""
        return (ids.tobytes() for ids, _ in self._documents(records))

    def _rows(self, records: Outputs) -> Iterator[bytes]:
        """A Parquet file with the ids of a document per row."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        sink = io.BytesIO()
        schema = pa.schema({"input_ids": pa.large_list(pa.from_numpy_dtype(self.dtype))})
        with pq.ParquetWriter(sink, schema) as writer:
            for ids, places in self._documents(records):
                lists = pa.LargeListArray.from_arrays(*map(_column, (places, ids)))
                writer.write_table(pa.table([lists], schema))
                yield sink.getvalue()
                sink.seek(0)
                sink.truncate()
        yield sink.getvalue()

    def _index(self, records: Outputs) -> Iterator[bytes]:
        """The places of documents, little-endian.

        The magic, version 1 (8 bytes), a code for the type of the ids (1 byte), the number of sequences and that of
        document indices (8 bytes each); then the length of each sequence (int32), its first byte in the .bin (int64),
        and the document indices (int64): 0 and, for each document, the number of sequences up to its end.
        """
        documents, start = sum(record["docs"] for record in records), 0
        yield struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, CODES[self.dtype.name], documents, documents + 1)
        for record in records:
            yield self._lengths(record).astype("<i4").tobytes()
        for record in records:
            sizes = self._lengths(record) * self.dtype.itemsize
            yield (start + np.cumsum(sizes, dtype="<i8") - sizes).tobytes()
            start += int(sizes.sum())
        yield np.arange(documents + 1, dtype="<i8").tobytes()

    def _lengths(self, record: Record) -> np.ndarray:
        """The exported tokens of each document of a shard."""
        return np.diff(TokenShard(self.folder / record["path"], record).read_offsets()) - self.without_bos


def _column(values: np.ndarray) -> Any:
    """An Arrow array of numbers, of their buffer: `pa.array` would import pandas."""
    import pyarrow as pa
    return pa.Array.from_buffers(pa.from_numpy_dtype(values.dtype), len(values), [None, pa.py_buffer(values)])


def export(run: Run, out: Path, split: str, form: str, *, without_bos: bool) -> None:
    """Make the folder `out`.

    Raises:
        UserError: the run has no such tokens, a shard has changed, or something else is at `out`.
    """
    encode, folder = run.finished("encode"), run.stage_folder("encode")
    shards = dict[str, Outputs]()
    for source in run.config.source_names:
        if records := [record for record in encode.outputs if (record["split"], record["source"]) == (split, source)]:
            shards[source] = records
    if not shards:
        raise UserError(f"{folder} has no token shards of the split {split}.")
    vocabulary = vocabulary_record(run.stage_folder("tokenizer"))
    dtype = np.dtype("<u2" if encode.counts["dtype"] == "uint16" and form == "megatron" else "<i4")
    tokens = Export(folder, shards, dtype, without_bos)
    files = tokens.files(form)
    counts = {name: dict(encode.counts["splits"][split][name]) for name in shards}
    for own in counts.values():
        own["tokens"] -= own["docs"] * without_bos
    sums = total(counts.values())
    made_of = {"format": form, "split": split, "sources": list(shards), "without_bos": without_bos,
               "encode": encode.digest, "tokenizer_sha256": vocabulary["sha256"]}
    with Draft(out, MANIFEST, made_of) as draft:
        if draft.complete:
            echo(f"{out} exists already, with these tokens")
            return
        if draft.done:
            echo(f"continuing: {len(draft.done):,} of {len(files):,} files are written")
        with ProgressBar("export", form, len(files), "files") as progress:
            for name, content in files.items():
                draft.make(name, partial(_write, content))
                progress.advance()
        draft.describe({
            "run": run.config.name, "bos": not without_bos, "eos": True, "dtype": dtype.name,
            "bos_id": vocabulary["bos_id"], "eos_id": vocabulary["eos_id"], "vocab_size": vocabulary["size"],
            "sources": counts, "total": sums, "files": [draft.done[name] for name in sorted(files)]})
        draft.publish()
    echo(f"{out}: {counted(sums['docs'], 'document')}, {sums['tokens']:,} tokens in {counted(len(files), 'file')}")


def _write(content: Callable[[], Iterator[bytes]], path: Path) -> str:
    """Write a file. Returns the hash of what it should hold."""
    digest = hashlib.sha256()
    with open(path, "wb") as file:
        for chunk in content():
            digest.update(chunk)
            file.write(chunk)
    return digest.hexdigest()
