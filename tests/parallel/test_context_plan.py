"""Which tokens each rank of a context group holds: all of them once, equally many, with equal work."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from drover.pipeline.parallel.context_plan import plan
from tests.refusal import refused


def work(lengths, ranks):
    """Pairs of query and key that each rank computes."""
    result = plan(tuple(map(int, lengths)), ranks)
    return [sum(int((end - begin) * (begin + end + 1 - 2 * document)) // 2
                for document, begin, end, _ in result.segments(rank)) for rank in range(ranks)]


@st.composite
def rows(draw):
    """(lengths of documents, ranks), the ranks dividing the row."""
    ranks = draw(st.integers(1, 6))
    lengths = draw(st.lists(st.one_of(st.integers(1, 4), st.integers(1, 60)), min_size=1, max_size=12))
    return (*lengths, ranks - sum(lengths) % ranks), ranks


@given(rows())
def test_every_token_is_on_one_rank_in_chunks_that_cut_each_document_evenly(row):
    """And each rank has as many, in the row's order, of two chunks of each document: one from either end."""
    lengths, ranks = row
    result = plan(lengths, ranks)
    assert result.places.shape == (ranks, sum(lengths) // ranks)
    assert sorted(result.places.ravel()) == list(range(sum(lengths)))
    assert (np.diff(result.places, axis=1) > 0).all(), "a rank's tokens are in the row's order"
    assert sum(work(lengths, ranks)) == sum(length * (length + 1) // 2 for length in lengths), "each pair once"
    sizes = np.diff(result.edges, axis=1)
    assert (sizes.sum(axis=1) == lengths).all() and (sizes.max(axis=1) - sizes.min(axis=1) <= 1).all()
    for rank in range(ranks):
        segments = list(result.segments(rank))
        assert [place for _, begin, end, _ in segments for place in range(begin, end)] == result.places[rank].tolist()
        assert {(begin, end) for _, begin, end, _ in segments} == {
            tuple(result.edges[document, chunk:chunk + 2]) for document in range(len(lengths))
            for chunk in (rank, 2 * ranks - 1 - rank) if sizes[document, chunk]}


@pytest.mark.parametrize(("length", "ranks"), [(512, 2), (512, 8), (8192, 4)])
def test_work_is_within_5_percent_of_even(length, ranks):
    """Also where documents are equal, of one token, or short after a long one."""
    lengths = np.random.default_rng(0).lognormal(np.log(100), 1.2, length).astype(int) + 1
    ends = np.cumsum(lengths)
    rows = [np.diff([0, *ends[ends < length], length]), [length * 3 // 4, *[1] * (length // 4)],
            *([*[size] * (length // size), *[length % size] * (length % size > 0)] for size in (1, 3, 13, 100, 512))]
    for row in rows:
        pairs = np.array(work(row, ranks))
        assert (abs(pairs / pairs.mean() - 1) <= 0.05).all()


def test_a_row_that_does_not_come_out_even_is_refused():
    refused(ValueError, "A row of 7 tokens cannot be split evenly over 2 ranks", plan, (3, 4), 2)
