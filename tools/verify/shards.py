"""Read text and token shards to their end: compare them with their records, and with each other.

Of a text shard one document is in memory; of a token shard the offsets of its documents and `CHUNK` tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from drover.pipeline.core.errors import UserError
from drover.pipeline.data.text_shards import read_shard
from drover.pipeline.data.token_shards import TokenShard, column_offsets, read_batch

CHUNK = 1 << 22
"""Tokens or keys in memory at once."""
Record = dict[str, Any]


def text_problems(folder: Path, record: Record, tokens: TokenShard | None = None) -> tuple[list[str], list[str]]:
    """Problems of a text shard (its tar, its members' names, its counts), and of its token shard. That must have the
    same documents in the same order, by key and length. The text is read once."""
    text_bytes, number, other = 0, -1, list[str]()
    try:
        for number, document in enumerate(read_shard(folder, record)):
            if document.source != record["source"]:
                raise UserError(f"the document {document.id} is of the source {document.source}, the shard of "
                                f"{record['source']}")
            text_bytes += (length := len(document.text.encode()))
            if tokens is not None and not other and number < tokens.documents:
                try:
                    found = tokens.document_key(number), tokens.document_bytes(number)
                except UserError as error:
                    other.append(_without_path(error, tokens.path))
                    continue
                if found != (key := document.key.partition("-")[0], length):
                    other.append(f"its document {number:,} is {found[0]} of {found[1]:,} bytes; in {record['path']} it "
                                 f"is {key} of {length:,}")
    except UserError as error:
        return [_without_path(error, folder / record["path"])], other
    if tokens is not None and number + 1 != tokens.documents:
        other.append(f"it holds {tokens.documents:,} documents, {record['path']} {number + 1:,}")
    return _count_problems(record, text_bytes), other


def _count_problems(record: Record, text_bytes: int) -> list[str]:
    return [] if text_bytes == record["text_bytes"] else [
        f"it holds {text_bytes:,} bytes of text, its record says {record['text_bytes']:,}"]


def token_problems(path: Path, record: Record, vocabulary: Record, *, mapped: bool) -> list[str]:
    """Problems of a token shard: layout, offsets, BOS and EOS, ids, counts.

    vocabulary: of the tokenizer stage (size, bos_id, eos_id, sha256). mapped: also read it with Arrow, which a damaged
    file may crash.
    """
    try:
        shard = TokenShard(path, record)
        text_bytes = sum(int(shard.text_bytes(start, min(start + CHUNK, shard.documents)).sum())
                         for start in range(0, shard.documents, CHUNK))
        return [*(_arrow_problems(path, record, vocabulary) if mapped else ()),
                *_id_problems(shard, shard.read_offsets(), vocabulary), *_count_problems(record, text_bytes)]
    except UserError as error:
        return [_without_path(error, path)]


def _arrow_problems(path: Path, record: Record, vocabulary: Record) -> Iterator[str]:
    """Compare Arrow's columns with the record, and the schema with the vocabulary."""
    batch = read_batch(path)
    if batch.num_rows != record["docs"]:
        yield f"Arrow reads {batch.num_rows:,} documents, its record says {record['docs']:,}"
    if other := {name: place for name, place in column_offsets(path).items() if place != record[name]}:
        yield f"Arrow finds columns at other places than its record says ({other})"
    said = {name.decode(): value.decode() for name, value in (batch.schema.metadata or {}).items()}
    for name, value in {"dtype": record["dtype"], "tokenizer_sha256": vocabulary["sha256"],
                        "vocab_size": vocabulary["size"], "bos_id": vocabulary["bos_id"],
                        "eos_id": vocabulary["eos_id"]}.items():
        if said.get(name) != str(value):
            yield f"its schema says {name} {said.get(name)}, it should be {value}"


def _id_problems(shard: TokenShard, offsets: NDArray[np.int64], vocabulary: Record) -> Iterator[str]:
    """The first id outside of the vocabulary, and the first BOS or EOS that is missing or misplaced."""
    starts, ends, bos, eos = offsets[:-1], offsets[1:] - 1, vocabulary["bos_id"], vocabulary["eos_id"]
    bounds = {"BOS": (bos, starts), "EOS": (eos, ends)} if bos != eos else {
        "BOS, which is EOS too,": (bos, np.union1d(starts, ends))}  # some vocabularies have one token for both
    told = set[str]()

    def where(at: int) -> str:
        number = int(np.searchsorted(offsets, at, side="right")) - 1
        return f"document {number:,}, key {shard.document_key(number)}"
    for start in range(0, shard.token_count, CHUNK):
        tokens = shard.tokens(start, stop := min(start + CHUNK, shard.token_count))
        if "id" not in told and (foreign := np.flatnonzero(tokens >= vocabulary["size"])).size:
            told.add("id")
            at = start + int(foreign[0])
            yield (f"its token {at:,} is the id {tokens[foreign[0]]}, outside of the vocabulary of "
                   f"{vocabulary['size']:,} ({where(at)})")
        for name, (number, places) in bounds.items():
            here = places[np.searchsorted(places, start):np.searchsorted(places, stop)]
            wrong = np.setxor1d(np.flatnonzero(tokens == number) + start, here)
            if name not in told and wrong.size:
                told.add(name)
                what = "is missing at" if int(wrong[0]) in here else "is inside of a document at"
                yield f"{name} {what} its token {wrong[0]:,} ({where(int(wrong[0]))})"


def _without_path(error: UserError, path: Path) -> str:
    """The error without the path and without what to do: a problem adds both."""
    return str(error).removeprefix(f"{path} ").partition(". ")[0].rstrip(".")
