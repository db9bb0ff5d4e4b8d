"""The validation documents to measure: their token shards and their texts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from drover.pipeline.contract.manifest import Manifest
from drover.pipeline.contract.stage_work import Work
from drover.pipeline.core.errors import UserError
from drover.pipeline.data.chosen_documents import Chosen, choose
from drover.pipeline.data.remote_tokens import shards_of
from drover.pipeline.data.text_shards import read_shard, shard_records

Wanted = dict[int, tuple[str, int, str]]
"""Documents of one source to read, by their number within the source, in order: key, UTF-8 bytes, and the name for
error messages."""


def byte_counts(text: bytes) -> np.ndarray:
    """How often each byte value occurs: (256,) int64."""
    return np.bincount(np.frombuffer(text, np.uint8), minlength=256).astype(np.int64)


def chosen_documents(work: Work) -> dict[str, Chosen]:
    """By source, the validation documents to measure."""
    found = {source: choose(shards, work.config.evaluate.validation_tokens)
             for source, shards in shards_of(work, "validation").items()}
    if not any(map(len, found.values())):
        raise UserError("There is no validation text to measure. Raise shard.validation_share "
                        f"(now {work.config.shard.validation_share}), or add documents.")
    return {source: chosen for source, chosen in found.items() if len(chosen)}


def wanted_texts(work: Work) -> dict[str, Wanted]:
    """By source, the texts of the measured documents to read; UserError if the token shards have more or fewer
    documents than the text shards."""
    chosen, (folder, manifest), found = chosen_documents(work), work.input("shard"), {}
    for source, shards in shards_of(work, "validation").items():
        if (own := chosen.get(source)) is None:
            continue
        texts = sum(record["docs"] for record in shard_records(manifest, "validation", source))
        if texts != own.of_documents:
            raise UserError(f"{work.input('encode')[0]} holds {'fewer' if texts > own.of_documents else 'more'} "
                            f"validation documents of {source} than {folder}. Run the stage encode again with --force.")
        starts = np.cumsum([0, *(each.documents for each in shards)])
        found[source] = {
            int(starts[shard] + place): (shards[shard].document_key(int(place)), int(size),
                                         f"Document {place} of {shards[shard].path}")
            for shard, place, size in zip(own.shards, own.places, own.text_bytes, strict=True)}
    return found


def read_texts(folder: Path, manifest: Manifest, source: str, wanted: Wanted) -> Iterator[bytes]:
    """The text of each wanted document, one in memory at a time; other documents are skipped.

    Raises:
        UserError: the token shards were not made of these text shards, so bits per byte would be wrong.
    """
    first = 0
    for record in sorted(shard_records(manifest, "validation", source), key=lambda record: str(record["path"])):
        own = [number for number in range(first, first + record["docs"]) if number in wanted]
        read = read_shard(folder, record, {number - first for number in own}) if own else ()
        first += record["docs"]
        for number, document in zip(own, read, strict=True):  # both in order
            key, size, name = wanted[number]
            text = document.text.encode()
            if (document.key, len(text)) != (key, size):
                raise UserError(f"{name} was made of another text ({key}) than the text shards have there "
                                f"({document.key}). Run the stage encode again with --force.")
            yield text


def training_text(folder: Path, manifest: Manifest, counted: int, given: int) -> tuple[np.ndarray, bytes]:
    """The byte counts of the training text, (256,) int64, and text of it for compressors.

    The counts are of the first documents of each shard, up to an equal share of `counted` bytes. The text has at most
    `given` bytes: all if it is so little, else the beginning of each shard, by its size.
    """
    records = shard_records(manifest, "train")
    share, part = counted / max(1, len(records)), given / max(1, given, training_bytes(manifest))
    counts, text = np.zeros(256, np.int64), bytearray()
    for record in records:
        taken, end = 0, len(text) + int(part * record["text_bytes"])
        for document in read_shard(folder, record):
            encoded = document.text.encode()
            if taken < share:
                counts += byte_counts(encoded)
                taken += len(encoded)
            text += encoded[:end - len(text)]
            if taken >= share and len(text) >= end:
                break
    return counts, bytes(text)


def training_bytes(manifest: Manifest) -> int:
    """UTF-8 bytes of the training text."""
    return sum(record["text_bytes"] for record in shard_records(manifest, "train"))
