"""Validation text: the loss on each source's documents, and the texts for the baselines."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from drover.pipeline.contract.manifest import Manifest
from drover.pipeline.contract.stage_work import Work
from drover.pipeline.core.errors import UserError
from drover.pipeline.core.files import Record
from drover.pipeline.data.chosen_documents import Chosen, ChosenDocuments, choose
from drover.pipeline.data.remote_tokens import shards_of
from drover.pipeline.data.shard_table import Shards
from drover.pipeline.data.text_shards import read_shard, shard_records

if TYPE_CHECKING:
    from drover.pipeline.evaluation.open_model import OpenedModel
    from drover.pipeline.parallel.ranks import Ranks


def chosen_documents(work: Work) -> dict[str, Chosen]:
    """By source, the validation documents to measure."""
    chosen = {source: choose(shards, work.config.evaluate.validation_tokens)
              for source, shards in shards_of(work, "validation").items()}
    if not any(map(len, chosen.values())):
        raise UserError("There is no validation text to measure. Raise shard.validation_share "
                        f"(now {work.config.shard.validation_share}), or add documents.")
    return {source: documents for source, documents in chosen.items() if len(documents)}


def measure_validation(work: Work, ranks: Ranks, opened: OpenedModel, length: int) -> Record:
    """The loss on each source's validation text, and how much text was measured; see `results.validation_results`.
    Every rank reads the documents of its own batches. length: tokens per window."""
    from drover.pipeline.evaluation.bits_per_byte import ValidationBatches, ValidationText, measure

    chosen = ranks.by_leader(lambda: chosen_documents(work))
    shards = shards_of(work, "validation")
    texts = {source: ValidationText(ChosenDocuments(shards[source], documents), int(documents.text_bytes.sum()),
                                    documents.lengths.tolist()) for source, documents in chosen.items()}
    batches = ValidationBatches(texts, batch=work.config.evaluate.batch, length=length, rank=ranks.rank,
                                world=ranks.world)
    measured = measure(lambda tokens, labels, documents, positions: opened.model(
        tokens, labels, documents=documents, positions=positions, reduction="none"), batches, ranks.device,
        together=opened.placed.together)
    return {"sources": {source: {
        "nats": measured[source].nats, "targets": measured[source].targets, "bytes": measured[source].text_bytes,
        "documents": len(documents), "tokens": int(documents.lengths.sum()), "of_documents": documents.of_documents,
        "of_tokens": documents.of_tokens} for source, documents in chosen.items()},
        "without_validation_text": [source.name for source in work.config.shard.sources if source.name not in chosen]}


def validation_texts(folder: Path, manifest: Manifest, source: str, shards: Shards, chosen: Chosen) -> Iterator[bytes]:
    """The text of each chosen document of a source, one in memory at a time.

    Raises:
        UserError: the token shards were not made of these text shards, so bits per byte would be wrong.
    """
    records = {Path(record["path"]).stem: record for record in shard_records(manifest, "validation", source)}
    for number in np.unique(chosen.shards):
        shard = shards[number]
        places = chosen.places[chosen.shards == number].tolist()
        record = records[shard.path.stem]
        for place, document in zip(places, read_shard(folder, record, set(places)), strict=True):  # both in order
            if document.key != shard.document_key(place):
                raise UserError(f"The token shard of {record['path']} was made of another text than the text shard has "
                                f"there ({document.key}). Run the stage encode again with --force.")
            yield document.text.encode()


def byte_counts(text: bytes) -> np.ndarray:
    """How often each byte value occurs: (256,) int64."""
    return np.bincount(np.frombuffer(text, np.uint8), minlength=256).astype(np.int64)


def training_text(folder: Path, manifest: Manifest, counted: int, given: int) -> tuple[np.ndarray, bytes]:
    """The byte counts of the training text, (256,) int64, and text of it for compressors.

    The counts are of the first documents of each shard, up to an equal share of `counted` bytes. The text has at most
    `given` bytes: all if it is so little, else the beginning of each shard, by its size.
    """
    records = shard_records(manifest, "train")
    share, part = counted / max(1, len(records)), given / max(1, given, training_bytes(manifest))
    counts = np.zeros(256, np.int64)
    text = bytearray()
    for record in records:
        taken = 0
        end = len(text) + int(part * record["text_bytes"])
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
