"""Best-fit packing against the plainest one, a piece at a time: nothing lost, nothing cut, the same bins."""

from itertools import pairwise

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from drover.pipeline.data.sampling.packing import best_fit


def plainly_packed(lengths, room):
    """Best fit from the longest piece on, each looked at by itself: the room that each bin is left with."""
    left = []
    for length in sorted(lengths, reverse=True):
        fits = [(free, number) for number, free in enumerate(left) if free >= length]
        if fits:
            left[min(fits)[1]] -= length
        else:
            left.append(room - length)
    return left


@given(room=st.integers(1, 60), data=st.data())
@settings(max_examples=200)
def test_bins_are_those_of_a_piece_at_a_time(room, data):
    lengths = data.draw(st.lists(st.integers(1, room), max_size=120))
    order, ends = best_fit(np.array(lengths, np.int64), room)
    assert sorted(order.tolist()) == list(range(len(lengths))) and ends[0] == 0 and ends[-1] == len(lengths)
    bins = [order[start:stop].tolist() for start, stop in pairwise(ends.tolist())]
    left = [room - sum(lengths[piece] for piece in own) for own in bins]
    assert all(own for own in bins) and min(left, default=0) >= 0
    assert sorted(left) == sorted(plainly_packed(lengths, room))
    for own in bins:  # the longest first; equal ones by their place
        assert own == sorted(own, key=lambda piece: (-lengths[piece], piece))
