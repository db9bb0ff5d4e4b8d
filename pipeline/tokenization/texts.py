"""The texts of a run's documents: from its text shards, and decoded where the documents came as tokens."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING

from drover.pipeline.data.text_shards import TextRecord, read_shard, shard_records
from drover.pipeline.data.token_shards import TokenShard
from drover.pipeline.tokenization.tokenizer import TokenBytes, load_tokenizer

if TYPE_CHECKING:
    from drover.pipeline.contract.run import Run

Texts = Iterator[tuple[str, str]]
"""The key and the text of documents."""


@dataclass(frozen=True)
class ShardTexts:
    """The documents of a shard.

    Attributes:
        name: without folder and ending.
        source: their source.
        text_bytes: UTF-8 bytes of all texts.
        read: returns the key and text of each document in order; given numbers of documents, only of these.
    """

    name: str
    source: str
    text_bytes: int
    read: Callable[[Collection[int] | None], Texts]


def shard_texts(run: Run, split: str) -> list[ShardTexts]:
    """The shards of a split: text shards, then token shards without one, as the stages have them."""
    folder = run.stage_folder("shard")
    result = [ShardTexts(Path(record["path"]).stem, record["source"], record["text_bytes"], partial(
        _texts, folder, record)) for record in shard_records(run.finished("shard"), split)]
    if not (sources := {source.name for source in run.config.encode.sources}):
        return result
    table = cache(lambda: TokenBytes(load_tokenizer(run.stage_folder("tokenizer"))))
    return result + [ShardTexts(Path(record["path"]).stem, record["source"], record["text_bytes"], partial(
        _decoded, TokenShard(run.stage_folder("encode") / record["path"], record), table))
                     for record in run.finished("encode").outputs
                     if record["split"] == split and record["source"] in sources]


def _texts(folder: Path, record: TextRecord, only: Collection[int] | None) -> Texts:
    return ((document.key, document.text) for document in read_shard(folder, record, only))


def _decoded(shard: TokenShard, table: Callable[[], TokenBytes], only: Iterable[int] | None) -> Texts:
    for number in range(shard.documents) if only is None else sorted(only):
        ids = shard.document_tokens(number)[1:-1]
        yield shard.document_key(number), table().text(ids).decode(errors="replace")
