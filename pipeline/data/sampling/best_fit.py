"""Best-fit packing: documents into sequences, none cut that is not longer than a sequence (Ding et al. 2024).

Pieces go from the longest to the shortest, each into the sequence with the least room that suffices, or into a new one.
Equal pieces are dealt out together: the sequences with one amount of room take as many as fit, all at once. So the work
grows with the number of different lengths, not of documents, and what is done for each document is done in arrays.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Integers = NDArray[np.int64]


class Pieces(NamedTuple):
    """Tokens of a shard that stay together: documents, or parts of them; (pieces,) each.

    starts, lengths: int64, in tokens. continues: whether the document does behind the piece's end.
    """

    starts: Integers
    lengths: Integers
    continues: NDArray[np.bool_]

    def cut(self, length: int) -> Pieces:
        """Each piece whole, or if it is longer than `length` one for each `length` tokens and one for the rest. What is
        cut continues only where it fills a sequence: of any other the next token is no label of its last one."""
        counts = -(-self.lengths // length)
        ends, continues = (self.starts + self.lengths).repeat(counts), self.continues.repeat(counts)
        within = np.arange(int(counts.sum())) - (np.cumsum(counts) - counts).repeat(counts)
        starts = self.starts.repeat(counts) + within * length
        lengths = np.minimum(length, ends - starts)
        return Pieces(starts, lengths, (starts + length < ends) | (continues & (lengths == length)))

    def joined(self) -> Pieces:
        """The same in the order of the shard, neighbours in one document joined; none may come twice."""
        order = np.argsort(self.starts)
        starts, lengths, continues = (part[order] for part in self)
        joins = continues[:-1] & (starts[:-1] + lengths[:-1] == starts[1:])
        first, last = np.append(True, ~joins)[:len(starts)], np.append(~joins, True)[:len(starts)]
        return Pieces(starts[first], (starts + lengths)[last] - starts[first], continues[last])


def documents_at(offsets: Integers) -> Pieces:
    """The documents that begin at `offsets`; the last of these is the end of the last document."""
    return Pieces(offsets[:-1], np.diff(offsets), np.zeros(len(offsets) - 1, bool))


def best_fit(lengths: Integers, room: int) -> tuple[Integers, Integers]:
    """Pieces of `lengths`, each in 1 .. room, into bins of `room`, by best fit from the longest on; ties by position.

    Returns the numbers of the pieces, bin after bin, the longest of a bin first, and where each bin begins among them,
    with the end of the last: (pieces,) and (bins + 1,).
    """
    order = np.argsort(-lengths, kind="stable")
    falling = lengths[order]
    edges = np.concatenate([[0], np.flatnonzero(np.diff(falling)) + 1, [len(order)]]).tolist()
    bins = _Bins(room)
    result = np.empty(len(order), np.int64)
    for at, end in pairwise(edges):
        while at < end:
            taken = bins.take(int(falling[at]), end - at)
            result[at:at + len(taken)] = taken
            at += len(taken)
    filled = np.bincount(result, minlength=bins.count)
    return order[np.argsort(result, kind="stable")], np.concatenate([[0], np.cumsum(filled)])


class _Bins:
    """Bins by the room that they have left, those with equal room in the order in which they came to it."""

    def __init__(self, room: int) -> None:
        self.room, self.count = room, 0
        self._free: dict[int, list[Integers]] = {}
        self._some = np.zeros(room + 1, bool)

    def take(self, size: int, pieces: int) -> Integers:
        """The bins of the next pieces of one size, at least one and at most so many: those that fit best.

        Where one bin has the least room, it still has once a piece is in it, so it takes as many as fit.
        """
        room = size + int(self._some[size:].argmax())
        if not self._some[room]:
            room = self.room
            fresh = -(-pieces // (room // size))
            self._put(room, np.arange(self.count, self.count + fresh))
            self.count += fresh
        each = room // size
        bins = np.concatenate(self._free.pop(room))
        self._some[room] = False
        needed = -(-pieces // each)
        self._put(room, bins[needed:])
        bins = bins[:needed]
        placed = bins.repeat(each)[:pieces]
        full, rest = divmod(len(placed), each)
        self._put(room - each * size, bins[:full])
        self._put(room - rest * size, bins[full:])
        return placed

    def _put(self, room: int, bins: Integers) -> None:
        if len(bins) and room:
            self._free.setdefault(room, []).append(bins)
            self._some[room] = True
