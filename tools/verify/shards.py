"""Text and token shards read to their end: whether they hold what their records say, and one what the other does.

Of a text shard one document is in memory, of a token shard the places at which its documents begin and `CHUNK` tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.data.documents import Document
from pipeline.data.text_shards import read_shard
from pipeline.data.token_shards import TokenShard, column_offsets, read_batch
from pipeline.errors import UserError

CHUNK = 1 << 22
"""Tokens or keys in memory at once."""
Record = dict[str, Any]


def text_problems(folder: Path, record: Record, tokens: TokenShard | None = None) -> tuple[list[str], list[str]]:
    """What is wrong with a text shard (its tar, its members' names, its counts), and with the token shard made of it:
    whether that has the same documents, in order, by key and length. The text is read once."""
    text_bytes, number, other = 0, -1, list[str]()
    try:
        for number, document in enumerate(_documents(folder, record)):
            length = len(document.text.encode())
            text_bytes += length
            if tokens is not None and not other and number < tokens.documents:
                other = _other_document(tokens, number, document.key.partition("-")[0], length, record["path"])
    except UserError as error:
        return [_told(error, folder / record["path"])], other
    if tokens is not None and number + 1 != tokens.documents:
        other.append(f"it holds {tokens.documents:,} documents, {record['path']} {number + 1:,}")
    return _count_problems(record, text_bytes), other


def _other_document(tokens: TokenShard, number: int, key: str, length: int, path: str) -> list[str]:
    try:
        found = tokens.document_key(number), tokens.document_bytes(number)
    except UserError as error:
        return [_told(error, tokens.path)]
    return [] if found == (key, length) else [
        f"its document {number:,} is {found[0]} of {found[1]:,} bytes; in {path} it is {key} of {length:,}"]


def _documents(folder: Path, record: Record) -> Iterator[Document]:
    """The documents; UserError where one is of another source than the shard's."""
    for document in read_shard(folder, record):
        if document.source != record["source"]:
            raise UserError(f"the document {document.id} is of the source {document.source}, the shard of "
                            f"{record['source']}")
        yield document


def _count_problems(record: Record, text_bytes: int) -> list[str]:
    if text_bytes == record["text_bytes"]:
        return []
    return [f"it holds {text_bytes:,} bytes of text, its record says {record['text_bytes']:,}"]


def token_problems(path: Path, record: Record, vocabulary: Record, *, mapped: bool) -> list[str]:
    """What is wrong with a token shard: layout, offsets, BOS and EOS, ids, counts.

    vocabulary: of the tokenizer stage (size, bos_id, eos_id, sha256). mapped: also read it as Arrow does, which a
    damaged file may take badly.
    """
    try:
        shard = TokenShard(path, record)
        offsets = shard.read_offsets()
        problems = [*_arrow_problems(path, record, vocabulary)] if mapped else []
        problems += _id_problems(shard, offsets, vocabulary)
        text_bytes = sum(int(block.sum()) for block in _text_lengths(shard))
        return problems + _count_problems(record, text_bytes)
    except UserError as error:
        return [_told(error, path)]


def _arrow_problems(path: Path, record: Record, vocabulary: Record) -> Iterator[str]:
    """Whether Arrow sees the columns where the record says that they are, and the schema names the vocabulary."""
    batch = read_batch(path)
    if batch.num_rows != record["docs"]:
        yield f"Arrow reads {batch.num_rows:,} documents, its record says {record['docs']:,}"
    if other := {name: place for name, place in column_offsets(path).items() if place != record[name]}:
        yield f"Arrow finds columns at other places than its record says ({other})"
    said = {name.decode(): value.decode() for name, value in (batch.schema.metadata or {}).items()}
    meant = {"dtype": record["dtype"], "tokenizer_sha256": vocabulary["sha256"],
             "vocab_size": str(vocabulary["size"]), "bos_id": str(vocabulary["bos_id"]),
             "eos_id": str(vocabulary["eos_id"])}
    for name, value in meant.items():
        if said.get(name) != value:
            yield f"its schema says {name} {said.get(name)}, it should be {value}"


def _id_problems(shard: TokenShard, offsets: NDArray[np.int64], vocabulary: Record) -> Iterator[str]:
    """The first id outside the vocabulary, and the first BOS or EOS that is where none should be or missing."""
    bounds = _bounds(offsets, vocabulary["bos_id"], vocabulary["eos_id"])
    told = set[str]()
    for start in range(0, shard.token_count, CHUNK):
        tokens = shard.tokens(start, stop := min(start + CHUNK, shard.token_count))
        if "id" not in told and (foreign := np.flatnonzero(tokens >= vocabulary["size"])).size:
            told.add("id")
            at = start + int(foreign[0])
            yield (f"its token {at:,} is the id {tokens[foreign[0]]}, outside of the vocabulary of "
                   f"{vocabulary['size']:,} ({_document(shard, offsets, at)})")
        for number, name, places in bounds:
            here = places[np.searchsorted(places, start):np.searchsorted(places, stop)]
            wrong = np.setxor1d(np.flatnonzero(tokens == number) + start, here)
            if name not in told and wrong.size:
                told.add(name)
                what = "is missing at" if int(wrong[0]) in here else "stands inside of a document at"
                yield f"{name} {what} its token {wrong[0]:,} ({_document(shard, offsets, int(wrong[0]))})"


def _bounds(offsets: NDArray[np.int64], bos: int, eos: int) -> list[tuple[int, str, NDArray[np.int64]]]:
    """The ids around documents: the id, what it is called, and all places in the shard where it should be, ascending.
    Some vocabularies have one token for both."""
    starts, ends = offsets[:-1], offsets[1:] - 1
    if bos == eos:
        return [(bos, "BOS, which is EOS too,", np.union1d(starts, ends))]
    return [(bos, "BOS", starts), (eos, "EOS", ends)]


def _document(shard: TokenShard, offsets: NDArray[np.int64], at: int) -> str:
    number = int(np.searchsorted(offsets, at, side="right")) - 1
    return f"document {number:,}, key {shard.document_key(number)}"


def _text_lengths(shard: TokenShard) -> Iterator[NDArray[np.int64]]:
    for start in range(0, shard.documents, CHUNK):
        yield shard.text_bytes(start, min(start + CHUNK, shard.documents))


def _told(error: UserError, path: Path) -> str:
    """The error without the path, which is told before it, and without what to do, which is told after it."""
    return str(error).removeprefix(f"{path} ").partition(". ")[0].rstrip(".")
