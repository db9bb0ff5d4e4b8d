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
    """Parts of a shard that stay in one piece, int64 and (pieces,) each.

    starts, lengths: in tokens; none is longer than a sequence, and none empty. goes_on: whether the document does.
    """

    starts: Integers
    lengths: Integers
    goes_on: NDArray[np.bool_]


class Runs(NamedTuple):
    """Tokens of a shard that are to stay together, documents or parts of them; (runs,) each.

    starts, ends: int64. goes_on: whether the document does, behind the run's end.
    """

    starts: Integers
    ends: Integers
    goes_on: NDArray[np.bool_]


def pieces_of(offsets: Integers, length: int) -> Pieces:
    """The documents that begin at `offsets` (the end of the last is the last of them): whole, or of those that are
    longer than `length` a piece for each `length` tokens and one for the rest."""
    return cut_runs(Runs(offsets[:-1], offsets[1:], np.zeros(len(offsets) - 1, bool)), length)


def cut_runs(runs: Runs, length: int) -> Pieces:
    """Each run whole, or if it is longer than `length` a piece for each `length` tokens and one for the rest. A piece
    goes on only where it fills a sequence: of any other the next token is no label of its last one."""
    counts = -(-(runs.ends - runs.starts) // length)
    ends, goes_on = runs.ends.repeat(counts), runs.goes_on.repeat(counts)
    within = np.arange(int(counts.sum())) - (np.cumsum(counts) - counts).repeat(counts)
    starts = runs.starts.repeat(counts) + within * length
    lengths = np.minimum(length, ends - starts)
    return Pieces(starts, lengths, (starts + length < ends) | (goes_on & (lengths == length)))


def joined_runs(pieces: Pieces) -> Runs:
    """Pieces, none twice, in the order of the shard, those joined that are neighbours in one document."""
    order = np.argsort(pieces.starts)
    starts, ends, goes_on = pieces.starts[order], (pieces.starts + pieces.lengths)[order], pieces.goes_on[order]
    joins = goes_on[:-1] & (ends[:-1] == starts[1:])
    first, last = np.ones(len(starts), bool), np.ones(len(starts), bool)
    first[1:], last[:-1] = ~joins, ~joins
    return Runs(starts[first], ends[last], goes_on[last])


def best_fit(lengths: Integers, room: int) -> tuple[Integers, Integers]:
    """Pieces of `lengths`, each in 1 .. room, into bins of `room`, by best fit from the longest on; ties by position.

    Returns the numbers of the pieces, bin after bin, the longest of a bin first, and where each bin begins among them,
    with the end of the last: (pieces,) and (bins + 1,).
    """
    order = np.argsort(-lengths, kind="stable")
    falling = lengths[order]
    edges = np.concatenate([[0], np.flatnonzero(np.diff(falling)) + 1, [len(order)]]).tolist()
    bins = _Bins(room)
    found = np.empty(len(order), np.int64)
    for at, end in pairwise(edges):
        while at < end:
            taken = bins.take(int(falling[at]), end - at)
            found[at:at + len(taken)] = taken
            at += len(taken)
    filled = np.bincount(found, minlength=bins.count)
    return order[np.argsort(found, kind="stable")], np.concatenate([[0], np.cumsum(filled)])


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
