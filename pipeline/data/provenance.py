"""Which documents are in which samples: from sample numbers back to shards, documents and their keys; and from a
document to the samples that hold a part of it.

The order is a pure function of the sample number, so nothing is stored for this: it is computed again. For a document
it is computed for every sample.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from drover.pipeline.core.console import first
from drover.pipeline.data.exclusion import sample_numbers
from drover.pipeline.data.sampling.loader import Sequences, TrainingData
from drover.pipeline.data.token_shards import TokenShard

AT_ONCE = 1 << 17
"""Samples that are located at once: so many fit the processor's cache."""


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


def pieces_of(data: TrainingData, documents: Collection[tuple[int, int]], end: int, count: Callable[[int], None]
              ) -> Iterator[DocumentSpan]:
    """Every part of some documents in the samples below `end`, in order. Each sample is located for it.

    Args:
        documents: by the shard's row in the table and the number in it.
        count: called with the number of samples that were looked at.
    """
    wanted = [(space, pool, held) for space, pools in enumerate(data.spaces) for pool, sequences in enumerate(pools)
              if len(held := _holding(sequences, documents))]
    table = data.shards[0].opened.table
    names = {(table.paths[row], document) for row, document in documents}
    for start in range(0, end if wanted else 0, AT_ONCE):
        samples = np.arange(start, min(start + AT_ONCE, end))
        located = data.order.locate(samples)
        result = np.zeros(len(samples), bool)
        for space, pool, held in wanted:
            result |= (located.space == space) & (located.pool == pool) & np.isin(located.sequence, held)
        yield from (piece for piece in pieces(data, samples[result])
                    if (piece.shard.record["path"], piece.document) in names)
        count(len(samples))


def _holding(sequences: Sequences, documents: Iterable[tuple[int, int]]) -> np.ndarray:
    """The numbers of the sequences that have a part of a document, each once."""
    held = [np.empty(0, np.int64)]
    for row, document in documents:
        for index in np.flatnonzero(sequences.shards.rows == row).tolist():
            begin, end = sequences.shards[index].document_span(document)
            parts = sequences.parts(index)
            held.append(parts.sequences[(parts.starts < end) & (parts.stops > begin)])
    return np.unique(np.concatenate(held))


def documents_of(data: TrainingData, ranges: Iterable[Sequence[int]]) -> list[SeenDocument]:
    """The documents in the samples of `ranges`, each once, in the order in which they come."""
    result: dict[tuple[Path, int], tuple[TokenShard, list[int]]] = {}
    for piece in pieces(data, sample_numbers(ranges)):  # a shard that was forgotten meanwhile is another object later
        result.setdefault((piece.shard.path, piece.document), (piece.shard, []))[1].append(piece.sample)
    return [SeenDocument(shard.source, path.name, document, shard.document_key(document), samples)
            for (path, document), (shard, samples) in result.items()]


def named(documents: Sequence[SeenDocument]) -> str:
    """Documents for a person: the first few by source, key and shard, and how many there are."""
    return first([f"{item.source}/{item.key} ({item.shard}, document {item.document})" for item in documents])
