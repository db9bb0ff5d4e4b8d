"""Export the token shards of one split. A format is a function that gives the content of each file, in chunks."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from drover.pipeline.contract.input_check import output, refuse_changed
from drover.pipeline.contract.run import Run
from drover.pipeline.core.console import ProgressBar, echo
from drover.pipeline.core.errors import UserError, require
from drover.pipeline.core.files import Record, sha256_json
from drover.pipeline.data.token_shards import TokenShard
from drover.pipeline.tokenization.files import vocabulary_record
from drover.tools.draft import Draft

MANIFEST = "export.json"
BLOCK_TOKENS = 1 << 22
"""Tokens in memory at once, unless one document has more."""
ROWS_AT_ONCE = 1000
"""Most rows of a record batch. To get one row, a reader reads its whole batch."""
CODES = {"uint16": 8, "int32": 4}
"""Megatron's codes for the types of ids."""
END_OF_STREAM = b"\xff\xff\xff\xff\0\0\0\0"
"""The end of an Arrow stream."""


@dataclass(frozen=True)
class Tokens:
    """Token shards to export.

    Attributes:
        folder: of the stage encode.
        shards: output records in the order of training, by source.
        without_bos: leave out the first id of each document.
        fingerprint: hash of the inputs that decide every byte of the export.
    """

    folder: Path
    shards: dict[str, list[Record]]
    dtype: str
    without_bos: bool
    fingerprint: str

    def counts(self, source: str) -> dict[str, int]:
        """Documents, exported tokens, UTF-8 bytes of text and shards of a source."""
        records = self.shards[source]
        counts = {name: sum(record[name] for record in records) for name in ("docs", "tokens", "text_bytes")}
        counts["tokens"] -= counts["docs"] * self.without_bos
        return {**counts, "shards": len(records)}

    def opened(self, record: Record) -> TokenShard:
        """A token shard. UserError if its file is missing or has changed."""
        path = self.folder / record["path"]
        if not path.is_file():
            raise UserError(f"{path} is missing. Run --stage encode again: it makes only what is missing.")
        refuse_changed(output(self.folder, record, "encode"))
        return TokenShard(path, record)

    def lengths(self, records: list[Record]) -> Iterator[np.ndarray]:
        """For each shard the exported tokens of each document."""
        for record in records:
            yield np.diff(TokenShard(self.folder / record["path"], record).read_offsets()) - self.without_bos

    def blocks(self, shard: TokenShard, most: int = BLOCK_TOKENS) -> Iterator[tuple[int, int, np.ndarray]]:
        """The exported tokens in blocks of at most `most` documents: first document, end, tokens."""
        offsets, first = shard.read_offsets(), 0
        while first < shard.documents:
            stop = int(np.searchsorted(offsets, offsets[first] + BLOCK_TOKENS, "right")) - 1
            stop = max(first + 1, min(stop, first + most))
            ids = shard.tokens(int(offsets[first]), int(offsets[stop]))
            yield first, stop, np.delete(ids, offsets[first:stop] - offsets[first]) if self.without_bos else ids
            first = stop


class Format(NamedTuple):
    """The description of a format in the manifest, and the content of each file."""

    facts: Record
    files: Mapping[str, Callable[[], Iterator[bytes]]]


def megatron(tokens: Tokens) -> Format:
    """Megatron Core's IndexedDataset: PREFIX.bin has the ids of all documents, PREFIX.idx their places.

    The index, little-endian: the magic, version 1 (8 bytes), a code for the type of the ids (1 byte), the number of
    sequences and that of document indices (8 bytes each); then the length of each sequence (int32), its first byte in
    the .bin (int64), and the document indices (int64): 0 and, for each document, the number of sequences up to its end.
    Here a document is one sequence. Unsigned ids of four bytes have no code, so they are written as int32.
    """
    dtype = np.dtype("<u2" if tokens.dtype == "uint16" else "<i4")

    def ids(records: list[Record]) -> Iterator[bytes]:
        for record in records:
            for _, _, block in tokens.blocks(tokens.opened(record)):
                yield block.astype(dtype).tobytes()

    def index(records: list[Record]) -> Iterator[bytes]:
        documents, start = sum(record["docs"] for record in records), 0
        yield struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, CODES[dtype.name], documents, documents + 1)
        for lengths in tokens.lengths(records):
            yield lengths.astype("<i4").tobytes()
        for lengths in tokens.lengths(records):
            ends = start + np.cumsum(lengths * dtype.itemsize, dtype="<i8")
            yield (ends - lengths * dtype.itemsize).tobytes()
            start += int(lengths.sum()) * dtype.itemsize
        yield np.arange(documents + 1, dtype="<i8").tobytes()

    return Format({"layout": "Megatron Core IndexedDataset, version 1; a document is one sequence",
                   "dtype": dtype.name, "dtype_code": CODES[dtype.name], "prefixes": list(tokens.shards)},
                  {f"{name}.{ending}": partial(content, records) for name, records in tokens.shards.items()
                   for ending, content in (("bin", ids), ("idx", index))})


def huggingface(tokens: Tokens) -> Format:
    """A folder for `datasets.load_from_disk`: an Arrow stream per token shard, a row per document."""
    require("--format hf", "datasets", "take --format megatron")
    import datasets
    import pyarrow as pa

    features = datasets.Features({"input_ids": datasets.List(datasets.Value(tokens.dtype)),
                                  "key": datasets.Value("string"), "source": datasets.Value("string"),
                                  "bytes": datasets.Value("int64")})

    def stream(record: Record) -> Iterator[bytes]:
        shard = tokens.opened(record)
        schema = features.arrow_schema.remove_metadata()
        yield schema.serialize()
        for first, stop, ids in tokens.blocks(shard, ROWS_AT_ONCE):
            offsets = shard.read_offsets()[first:stop + 1]
            offsets = offsets - offsets[0] - np.arange(stop - first + 1) * tokens.without_bos
            yield pa.record_batch([
                pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), pa.array(ids)),
                pa.array([key.tobytes().hex() for key in shard.keys(first, stop)], pa.string()),
                pa.array([shard.source] * (stop - first), pa.string()),
                pa.array(shard.text_bytes(first, stop))], schema=schema).serialize()
        yield END_OF_STREAM

    records = [record for own in tokens.shards.values() for record in own]
    names = [f"data-{number:05d}-of-{len(records):05d}.arrow" for number in range(len(records))]
    described = {"dataset_info.json": {"description": "", "citation": "", "homepage": "", "license": "",
                                       "features": features.to_dict()},
                 "state.json": {"_data_files": [{"filename": name} for name in names],
                                "_fingerprint": tokens.fingerprint[:16], "_format_columns": None, "_format_kwargs": {},
                                "_format_type": None, "_output_all_columns": False, "_split": None}}
    return Format({"layout": "datasets.load_from_disk; columns input_ids, key, source, bytes", "dtype": tokens.dtype},
                  {**{name: partial(stream, record) for name, record in zip(names, records, strict=True)},
                   **{name: partial(_json, content) for name, content in described.items()}})


def _json(content: Record) -> Iterator[bytes]:
    yield json.dumps(content, indent=1).encode() + b"\n"


FORMATS = {"megatron": megatron, "hf": huggingface}


def export(run: Run, out: Path, form: str, split: str, source: str | None, *, without_bos: bool) -> None:
    """Make the folder `out`. source: only this one.

    Raises:
        UserError: the run has no such tokens, a shard has changed, or something else is at `out`.
    """
    encode, folder, names = run.finished("encode"), run.stage_folder("encode"), \
        [own.name for own in run.config.shard.sources]
    if source not in (None, *names):
        raise UserError(f"{run.folder} has no source {source}; it has {', '.join(names)}.")
    shards = {name: [record for record in encode.outputs if (record["split"], record["source"]) == (split, name)]
              for name in names if source in (None, name)}
    shards = {name: records for name, records in shards.items() if records}
    if not shards:
        raise UserError(f"{folder} has no token shards of the split {split}{f' of {source}' if source else ''}.")
    vocabulary = vocabulary_record(run.stage_folder("tokenizer"))
    made_of = {"format": form, "split": split, "sources": list(shards), "without_bos": without_bos,
               "encode": encode.digest, "tokenizer_sha256": vocabulary["sha256"]}
    tokens = Tokens(folder, shards, encode.counts["dtype"], without_bos, sha256_json(made_of))
    facts, files = FORMATS[form](tokens)
    counts = {name: tokens.counts(name) for name in shards}
    total = {key: sum(own[key] for own in counts.values()) for key in ("docs", "tokens", "text_bytes", "shards")}
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
        draft.describe({"run": run.config.name, **facts, "bos": not without_bos, "eos": True,
                        "bos_id": vocabulary["bos_id"], "eos_id": vocabulary["eos_id"],
                        "vocab_size": vocabulary["size"], "sources": counts, "total": total,
                        "files": [draft.done[name] for name in sorted(files)]})
        draft.publish()
    echo(f"{out}: {total['docs']:,} documents, {total['tokens']:,} tokens in {len(files)} files")


def _write(content: Callable[[], Iterator[bytes]], path: Path) -> str:
    """Write a file. Returns the hash of what it should hold."""
    digest = hashlib.sha256()
    with open(path, "wb") as file:
        for chunk in content():
            digest.update(chunk)
            file.write(chunk)
    return digest.hexdigest()
