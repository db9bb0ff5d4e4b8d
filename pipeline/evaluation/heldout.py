"""The held-out documents that are measured: their token shards and their texts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from drover.pipeline.contract.manifest import Manifest
from drover.pipeline.contract.stage_work import Work
from drover.pipeline.core.errors import UserError
from drover.pipeline.data.chosen_documents import Chosen
from drover.pipeline.data.shard_table import Shards, ShardTable, open_by_source
from drover.pipeline.data.stored.opening import opener_of
from drover.pipeline.data.text_shards import read_shard, shard_records
from drover.pipeline.data.token_shards import TokenShard


def byte_counts(text: bytes) -> np.ndarray:
    """How often each byte value occurs: (256,) int64."""
    return np.bincount(np.frombuffer(text, np.uint8), minlength=256).astype(np.int64)


def heldout_shards(work: Work, sources: Iterable[str]) -> dict[str, Shards]:
    """The token shards of the sources' held-out documents, which are open together."""
    folder, manifest = work.input("encode")
    table = ShardTable.of(manifest.outputs)
    return open_by_source(folder, table, "heldout", sources, opener_of(work.config, folder, table, work.say))


@dataclass(frozen=True)
class TextWanted:
    """Documents of one source whose text is to be read, by their number among the source's, in order: key, UTF-8
    bytes, and what to call it in an error."""

    documents: dict[int, tuple[str, int, str]]

    @property
    def size(self) -> int:
        """Bytes in all."""
        return sum(size for _, size, _ in self.documents.values())


def wanted_text(shard: tuple[Path, Manifest], encode: Path, shards: Sequence[TokenShard], source: str,
                chosen: Chosen) -> TextWanted:
    """What is to be read of a source's text; UserError if its token shards, in the folder `encode`, have more or fewer
    documents than its text."""
    texts = sum(record["docs"] for record in shard_records(shard[1], "heldout", source))
    if texts != chosen.of_documents:
        raise UserError(f"{encode} holds {'fewer' if texts > chosen.of_documents else 'more'} held-out documents of "
                        f"{source} than {shard[0]}. Run the stage encode again with --force.")
    starts = np.cumsum([0, *(each.documents for each in shards)])
    return TextWanted({
        int(starts[shard] + place): (shards[shard].document_key(int(place)), int(size),
                                     f"Document {place} of {shards[shard].name}")
        for shard, place, size in zip(chosen.shards, chosen.places, chosen.text_bytes, strict=True)})


def read_texts(folder: Path, manifest: Manifest, source: str, wanted: TextWanted) -> Iterator[bytes]:
    """The text of each wanted document, one in memory at a time; what lies between them is passed over.

    Raises:
        UserError: the token shards are not of these text shards: bits per byte would be of something else.
    """
    first = 0
    for record in sorted(shard_records(manifest, "heldout", source), key=lambda record: str(record["path"])):
        own = [number for number in range(first, first + record["docs"]) if number in wanted.documents]
        read = read_shard(folder, record, {number - first for number in own}) if own else ()
        first += record["docs"]
        for number, document in zip(own, read, strict=True):  # both in order
            key, size, name = wanted.documents[number]
            text = document.text.encode()
            if (document.key, len(text)) != (key, size):
                raise UserError(f"{name} was made of another text ({key}) than the text shards have there "
                                f"({document.key}). Run the stage encode again with --force.")
            yield text


def training_byte_counts(folder: Path, manifest: Manifest, max_bytes: int) -> np.ndarray:
    """The byte counts of the training text: (256,) int64.

    Of each shard the first documents are read, until it has given its equal share of `max_bytes`.
    """
    records: list[dict[str, Any]] = shard_records(manifest, "train")
    share = max_bytes / max(1, len(records))
    counts = np.zeros(256, np.int64)
    for record in records:
        taken = 0
        for document in read_shard(folder, record):
            text = document.text.encode()
            counts += byte_counts(text)
            taken += len(text)
            if taken >= share:
                break
    return counts
