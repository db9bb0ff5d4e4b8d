"""Which documents are in which samples: from sample numbers back to shards, documents and their keys; and from a
document to the samples that hold a part of it.

The order is a pure function of the sample number, so nothing is stored for this: it is computed again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from drover.pipeline.core.console import first
from drover.pipeline.data.exclusion import sample_numbers
from drover.pipeline.data.sampling.loader import TrainingData
from drover.pipeline.data.sampling.order import PHASE_EPOCHS
from drover.pipeline.data.token_shards import TokenShard


@dataclass(frozen=True)
class DocumentSpan:
    """A document's part of a training sequence: tokens [start, stop) of document number `document` of `shard`."""

    sample: int
    shard: TokenShard
    document: int
    start: int
    stop: int

    @property
    def key(self) -> str:
        """The document's key in its text shard."""
        return self.shard.document_key(self.document)

    def ids(self) -> np.ndarray:
        """The piece's tokens, read from the shard."""
        base, _ = self.shard.document_span(self.document)
        return self.shard.tokens(base + self.start, base + self.stop)


@dataclass(frozen=True)
class SeenDocument:
    """A document, and the samples asked for that hold a part of it."""

    source: str
    shard: str
    document: int
    key: str
    samples: list[int]


def pieces(data: TrainingData, samples: np.ndarray) -> Iterator[DocumentSpan]:
    """Every document's part of the samples with these numbers, in order."""
    for sample, (sequences, number) in zip(samples, data.located(samples), strict=True):
        for span in sequences.spans(number):
            at = span.start
            while at < span.stop:
                document = span.shard.document_at(at)
                begin, end = span.shard.document_span(document)
                stop = min(end, span.stop)
                yield DocumentSpan(int(sample), span.shard, document, at - begin, stop - begin)
                at = stop


@dataclass(frozen=True)
class Reading:
    """One reading of a part of a document: its tokens [start, stop) in this sample, in the `epoch`-th pass over the
    pool (from 0).

    own_phase: the phase, from 1, that began to read the pool by itself, with its own epochs; 0 if none did.
    """

    sample: int
    epoch: int
    start: int
    stop: int
    own_phase: int = 0


def readings(data: TrainingData, pool: int, index: int, document: int, below: int) -> list[Reading]:
    """When a document is read: `pieces` backwards, in the order of samples; only of those below `below`.

    Args:
        pool, index: the pool, and the shard's place in it.
    """
    begin, end = data.shards[pool][index].document_span(document)
    found = data.readings_of(pool, index, begin, end, below)
    return [Reading(sample, epoch % PHASE_EPOCHS, start - begin, stop - begin, epoch // PHASE_EPOCHS)
            for sample, epoch, start, stop in found.tolist()]


def documents_of(data: TrainingData, ranges: Iterable[Sequence[int]]) -> list[SeenDocument]:
    """The documents in the samples of `ranges`, each once, in the order in which they come."""
    found: dict[tuple[Path, int], tuple[TokenShard, list[int]]] = {}
    for piece in pieces(data, sample_numbers(ranges)):  # a shard that was forgotten meanwhile is another object later
        found.setdefault((piece.shard.path, piece.document), (piece.shard, []))[1].append(piece.sample)
    return [SeenDocument(shard.source, path.name, document, shard.document_key(document), samples)
            for (path, document), (shard, samples) in found.items()]


def named(documents: Sequence[SeenDocument]) -> str:
    """Documents for a person: the first few by source, key and shard, and how many there are."""
    return first([f"{item.source}/{item.key} ({item.shard}, document {item.document})" for item in documents])
