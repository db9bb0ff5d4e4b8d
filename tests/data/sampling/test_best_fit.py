"""Best-fit packing against the plainest one, a piece at a time: nothing lost, nothing cut, the same bins."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from drover.pipeline.data.sampling.best_fit import best_fit, documents_at


def plainly_packed(lengths, room):
    """Best fit from the longest piece on, each looked at by itself: the room that each bin is left with."""
    left: list[int] = []
    for length in sorted(lengths, reverse=True):
        fits = [(free, number) for number, free in enumerate(left) if free >= length]
        if fits:
            left[min(fits)[1]] -= length
        else:
            left.append(room - length)
    return left


def packed(lengths, room):
    order, ends = best_fit(np.array(lengths, np.int64), room)
    assert sorted(order.tolist()) == list(range(len(lengths))) and ends[0] == 0 and ends[-1] == len(lengths)
    return [order[start:stop].tolist() for start, stop in pairwise(ends.tolist())]


@given(room=st.integers(1, 60), data=st.data())
@settings(max_examples=200, deadline=None)
def test_bins_are_those_of_a_piece_at_a_time(room, data):
    lengths = data.draw(st.lists(st.integers(1, room), max_size=120))
    bins = packed(lengths, room)
    left = [room - sum(lengths[piece] for piece in own) for own in bins]
    assert all(own for own in bins) and min(left, default=0) >= 0
    assert sorted(left) == sorted(plainly_packed(lengths, room))
    for own in bins:  # the longest first; equal ones by their place
        assert own == sorted(own, key=lambda piece: (-lengths[piece], piece))


@given(length=st.integers(1, 30), documents=st.lists(st.integers(0, 100), max_size=40))
@settings(max_examples=100, deadline=None)
def test_pieces_are_whole_documents_unless_those_are_longer(length, documents):
    pieces = documents_at(np.cumsum([0, *documents])).cut(length)
    found = zip(*(column.tolist() for column in pieces), strict=True)
    at = 0
    for document in documents:
        parts = [(at + start, min(length, document - start), start + length < document)
                 for start in range(0, document, length)]
        assert [next(found) for _ in parts] == parts
        at += document
    assert next(found, None) is None


def test_the_same_pieces_give_the_same_bins():
    """A change here orphans every packed run in progress."""
    order, ends = best_fit(np.array([5, 3, 8, 3, 2, 2, 1, 7, 3]), 8)
    assert order.tolist() == [2, 7, 6, 0, 1, 3, 8, 4, 5] and ends.tolist() == [0, 1, 3, 5, 8, 9]
