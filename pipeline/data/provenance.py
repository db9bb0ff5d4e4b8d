"""Which documents are in which samples: from sample numbers back to shards, documents and their keys.

The order is a pure function of the sample number, so nothing is stored for this: it is computed again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.data.exclusion import sample_numbers
from pipeline.data.loader import TrainingData
from pipeline.data.token_shards import TokenShard


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
    samples: tuple[int, ...]

    def record(self) -> dict[str, Any]:
        """As JSON."""
        return {"source": self.source, "shard": self.shard, "document": self.document, "key": self.key,
                "samples": list(self.samples)}


def pieces(data: TrainingData, samples: np.ndarray) -> Iterator[DocumentSpan]:
    """Every document's part of the samples with these numbers, in order."""
    pools, _, sequences = data.order.locate(samples)
    for sample, pool, sequence in zip(samples, pools, sequences, strict=True):
        stream, at = data.streams[pool], int(sequence) * data.length
        end = at + data.length
        while at < end:
            index = int(np.searchsorted(stream.ends, at, side="right"))
            shard = stream.shards[index]
            base = int(stream.ends[index]) - shard.token_count
            document = shard.document_at(at - base)
            begin, stop = shard.document_span(document)
            stop = min(stop, end - base)
            yield DocumentSpan(int(sample), shard, document, at - base - begin, stop - begin)
            at = base + stop


def documents_of(data: TrainingData, ranges: Iterable[Sequence[int]]) -> list[SeenDocument]:
    """The documents in the samples of `ranges`, each once, in the order in which they come."""
    found: dict[tuple[Path, int], tuple[TokenShard, list[int]]] = {}
    for piece in pieces(data, sample_numbers(ranges)):  # a shard that was forgotten meanwhile is another object later
        found.setdefault((piece.shard.path, piece.document), (piece.shard, []))[1].append(piece.sample)
    return [SeenDocument(shard.source, path.name, document, shard.document_key(document), tuple(samples))
            for (path, document), (shard, samples) in found.items()]


def named(documents: Sequence[SeenDocument], first: int = 3) -> str:
    """Documents for a person: the first few by source, key and shard, and how many there are."""
    names = [f"{item.source}/{item.key} ({item.shard}, document {item.document})" for item in documents[:first]]
    more = len(documents) - len(names)
    return ", ".join(names) + (f" and {more:,} more" if more else "")
