"""Where the tokens of sequences lie, where documents follow one another and are cut wherever a sequence is full.

`pipeline/data/sampling/packing.py` has the other way to make sequences of documents.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from drover.pipeline.data.shard_table import Shards
from drover.pipeline.data.token_shards import TokenShard


class Span(NamedTuple):
    """Tokens [start, stop) of a shard."""

    shard: TokenShard
    start: int
    stop: int


class Overlap(NamedTuple):
    """Parts of a document in sequences: the sequences' numbers, ascending; and the first token of the shard of each
    part, and the one after its last, int64 of one length. A sequence comes as often as it has parts."""

    numbers: np.ndarray
    starts: np.ndarray
    stops: np.ndarray


class TokenStream:
    """Token shards laid end to end, read by position. They may be many more than are open at once (`Shards`)."""

    def __init__(self, shards: Shards) -> None:
        self.shards = shards
        self.ends = np.cumsum(shards.token_counts, dtype=np.int64)

    @property
    def tokens(self) -> int:
        """Length of the stream."""
        return int(self.ends[-1]) if len(self.ends) else 0

    def spans(self, start: int, stop: int) -> list[Span]:
        """Tokens [start, stop) of the stream: a span of each shard that has some."""
        index, found = int(self.ends.searchsorted(start, side="right")), []
        while start < stop:
            shard, end = self.shards[index], int(self.ends[index])
            base, at = end - shard.token_count, min(stop, end)
            if base < end:  # a shard without tokens has none of them
                found.append(Span(shard, start - base, at - base))
            start, index = at, index + 1
        return found

    def shards_within(self, starts: np.ndarray, stops: np.ndarray) -> np.ndarray:
        """Which shards the tokens [start, stop) of several places lie in: their numbers here, ascending, each once."""
        edges = np.zeros(len(self.ends) + 1, np.int64)
        np.add.at(edges, np.searchsorted(self.ends, starts, side="right"), 1)
        np.add.at(edges, np.minimum(np.searchsorted(self.ends, stops - 1, side="right"), len(self.ends) - 1) + 1, -1)
        return np.flatnonzero(np.cumsum(edges)[:-1])


class Windows:
    """Sequences that are cut from a stream wherever `length` tokens end: all of them are full.

    Attributes:
        shards: what they are made of. count: how many there are.
    """

    def __init__(self, stream: TokenStream, length: int) -> None:
        self.stream, self.length, self.shards = stream, length, stream.shards
        self.count = max(0, stream.tokens - 1) // length

    def fill(self, number: int, row: np.ndarray) -> tuple[np.ndarray, int]:
        """Read a sequence into `row`, (length + 1,) ids of 32 bits, and behind it the token that is its last label.

        Returns the places in the row at which documents begin, length included where there is no last label, and how
        many tokens of the sequence mean something.
        """
        begin, at, starts = number * self.length, 0, []
        for shard, start, stop in self.stream.spans(begin, begin + self.length + 1):
            row[at:at + stop - start] = shard.tokens(start, stop)
            starts.append(shard.document_starts(start, stop) + (at - start))
            at += stop - start
        return starts[0] if len(starts) == 1 else np.concatenate(starts), self.length

    def spans(self, number: int, label: int = 0) -> list[Span]:
        """The tokens of a sequence in their order, without padding; with label=1 that of the last label, too."""
        return self.stream.spans(number * self.length, (number + 1) * self.length + label)

    def rows(self, numbers: np.ndarray) -> np.ndarray:
        """The rows, in their table, of the shards from which `fill` reads these sequences; ascending, each once."""
        starts = numbers * self.length
        return self.shards.rows[self.stream.shards_within(starts, starts + self.length + 1)]

    def overlap(self, index: int, begin: int, end: int) -> Overlap:
        """The sequences with some of the tokens [begin, end) of shard number `index` (a place in `shards`): `spans`
        backwards. The stream's last tokens, which fill no sequence and its last label, are in none."""
        base = int(self.stream.ends[index - 1]) if index else 0
        first, stop = (base + begin) // self.length, -(-(base + end) // self.length) if begin < end else 0
        numbers = np.arange(first, min(stop, self.count), dtype=np.int64)
        starts = numbers * self.length - base
        return Overlap(numbers, np.maximum(starts, begin), np.minimum(starts + self.length, end))
