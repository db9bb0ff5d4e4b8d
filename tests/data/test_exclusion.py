"""Batches around excluded samples: every other sample once, however the taking is cut up."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from drover.pipeline.data.exclusion import Excluded, ranges_of, sample_numbers

RANGES = st.lists(st.tuples(st.integers(0, 200), st.integers(0, 40)).map(lambda item: (item[0], item[0] + item[1])),
                  max_size=6)


def allowed(ranges, cursor, count):
    """The plain way: go through the numbers one by one, more than any count and ranges reach."""
    return [number for number in range(cursor, 1000)
            if not any(first <= number < end for first, end in ranges)][:count]


@given(ranges=RANGES, cursor=st.integers(0, 250), counts=st.lists(st.integers(0, 60), min_size=1, max_size=5))
def test_taking_is_the_same_however_it_is_cut(ranges, cursor, counts):
    excluded, at, parts = Excluded(ranges), cursor, []
    for count in counts:
        taken = excluded.take(at, count)
        parts += sample_numbers(taken.ranges).tolist()
        at = taken.end
    assert parts == allowed(ranges, cursor, sum(counts)) == excluded.numbers(cursor, 0, sum(counts)).tolist()
    assert parts[counts[0]:] == excluded.numbers(cursor, counts[0], sum(counts[1:])).tolist()
    assert at == excluded.take(cursor, sum(counts)).end == (parts[-1] + 1 if parts else cursor)


@given(ranges=RANGES, first=st.integers(0, 250), length=st.integers(0, 100))
def test_a_span_is_its_parts_within_and_what_remains(ranges, first, length):
    excluded, end = Excluded(ranges), first + length
    out, used = (sample_numbers(part(first, end)).tolist() for part in (excluded.within, excluded.remaining))
    assert out == [number for number in range(first, end) if any(a <= number < b for a, b in ranges)]
    assert used == sorted({*range(first, end)} - {*out})
    assert ranges_of(np.array(out, np.int64)) == list(excluded.within(first, end))
