"""Where the tokens of sequences lie, where documents follow one another and are cut wherever a sequence is full.

`pipeline/data/sampling/packing.py` has the other way to make sequences of documents.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from drover.pipeline.data.token_shards import Shards, TokenShard


class Span(NamedTuple):
    """Tokens [start, stop) of a shard."""

    shard: TokenShard
    start: int
    stop: int


class Parts(NamedTuple):
    """What the sequences have of a shard, in the shard's order: the sequence of each part, and the first token of the
    shard in it and the one after its last; int64 of one length. A sequence comes as often as it has parts."""

    sequences: np.ndarray
    starts: np.ndarray
    stops: np.ndarray


class Windows:
    """Sequences that are cut wherever `length` tokens end from the tokens of shards laid end to end: all are full.

    Attributes:
        shards: what they are made of, perhaps many more than are open at once. count: how many sequences there are.
        tokens: of all shards.
    """

    def __init__(self, shards: Shards, length: int) -> None:
        self.shards, self.length = shards, length
        self._ends = np.cumsum(shards.token_counts, dtype=np.int64)
        self.tokens = int(self._ends[-1]) if len(shards) else 0
        self.count = max(0, self.tokens - 1) // length

    def fill(self, number: int, row: np.ndarray) -> tuple[np.ndarray, int]:
        """Read a sequence into `row`, (length + 1,) ids of 32 bits, and behind it the token that is its last label.

        Returns the places in the row at which documents begin, length included where there is no last label, and how
        many tokens of the sequence mean something.
        """
        at, starts = 0, []
        for shard, start, stop in self.spans(number, 1):
            row[at:at + stop - start] = shard.tokens(start, stop)
            starts.append(shard.document_starts(start, stop) + (at - start))
            at += stop - start
        return starts[0] if len(starts) == 1 else np.concatenate(starts), self.length

    def spans(self, number: int, label: int = 0) -> list[Span]:
        """The tokens of a sequence in their order, without padding, a span of each shard that has some; with label=1
        that of the last label, too."""
        start, stop = number * self.length, (number + 1) * self.length + label
        index, result = int(self._ends.searchsorted(start, side="right")), []
        while start < stop:
            shard, end = self.shards[index], int(self._ends[index])
            base, at = end - shard.token_count, min(stop, end)
            if base < end:  # a shard without tokens has none of them
                result.append(Span(shard, start - base, at - base))
            start, index = at, index + 1
        return result

    def rows(self, numbers: np.ndarray) -> np.ndarray:
        """The rows, in their table, of the shards from which `fill` reads these sequences; ascending, each once."""
        begins = numbers * self.length
        first = self._ends.searchsorted(begins, side="right")
        last = self._ends.searchsorted(begins + self.length, side="right")
        edges = np.bincount(first, minlength=len(self._ends) + 1) - np.bincount(last + 1, minlength=len(self._ends) + 1)
        return self.shards.rows[np.cumsum(edges)[:-1] > 0]

    def parts(self, index: int) -> Parts:
        """The parts of shard number `index` (a place in `shards`) in all sequences. The last tokens of all, which fill
        no sequence and its last label, are in none."""
        end = int(self._ends[index])
        base = end - int(self.shards.token_counts[index])
        sequences = np.arange(base // self.length, min(-(-end // self.length), self.count), dtype=np.int64)
        starts = sequences * self.length - base
        return Parts(sequences, np.maximum(starts, 0), np.minimum(starts + self.length, end - base))
