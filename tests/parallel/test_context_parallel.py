"""Attention over a sequence that is split over ranks; tests/parallel/matrix.py has all that is around attention."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from drover.model.attention.backend import Documents
from drover.pipeline.config.training import ParallelConfig
from drover.pipeline.parallel.context_parallel import ContextParallel, places, plan
from drover.pipeline.parallel.grid import Grid
from tests.model import test_backends
from tests.model.test_backends import WAYS, inputs, numbered
from tests.parallel.groups import run_case
from tests.parallel.train_steps import exchanges
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
        assert [place for _, begin, end, _ in result.segments(rank) for place in range(begin, end)] == \
            result.places[rank].tolist()


def test_work_is_within_5_percent_of_even():
    """As docs/parallelism.md says; also where documents are equal, of one token, or short after a long one."""
    ends = np.cumsum(np.random.default_rng(0).lognormal(np.log(100), 1.2, 512).astype(int) + 1)
    rows = [np.diff([0, *ends[ends < 512], 512]), [384, *[1] * 128],
            *([*[size] * (512 // size), *[512 % size] * (512 % size > 0)] for size in (1, 3, 13, 100, 512))]
    for row in rows:
        pairs = np.array(work(row, 8))
        assert (abs(pairs / pairs.mean() - 1) <= 0.05).all()


def test_a_row_that_does_not_come_out_even_is_refused():
    refused(ValueError, "A row of 7 tokens cannot be split evenly over 2 ranks", plan, (3, 4), 2)


ROWS = {
    "one document": ((48,), (48,)),
    "of one token": ((1,) * 48, (1,) * 48),
    "mixed": ((1, 9, 1, 5, 32), (7, 41)),
    "shorter than the chunks": ((3, 5, 2, 7, 1, 6, 4, 3, 5, 12), (2,) * 24),
}


def attended(ranks, kv_heads):
    """Asserts on each rank that its part of attention, and of the gradients, is that of the dense mask: of each way and
    kind of row."""
    mesh = Grid(ranks, ParallelConfig(cp=ranks.world)).mesh["context"]
    for backend, rows in itertools.product(WAYS, ROWS.values()):
        index = places(rows, ranks.world)[:, ranks.rank, :, None, None]

        def mine(whole, index=index):
            return whole.gather(1, index.expand(-1, -1, *whole.shape[2:]))

        three = inputs(rows, kv_heads)
        expected = test_backends.attended(WAYS[0], three, rows)
        parts = [mine(whole.detach()).requires_grad_() for whole in three]
        context = ContextParallel(backend, mesh)
        documents = Documents(mine(numbered(rows)[..., None, None])[..., 0, 0],
                              [length for row in rows for length in row])
        result = context.attend(parts[0], *context.offer(*parts[1:]), context.prepare(documents, torch.float64))
        upstream = torch.randn(expected.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        gradients = torch.autograd.grad(expected, three, upstream)
        for ours, golden in zip((result, *torch.autograd.grad(result, parts, mine(upstream))), (expected, *gradients),
                                strict=True):
            torch.testing.assert_close(ours, mine(golden), rtol=0, atol=1e-12)


@pytest.mark.parametrize(("ranks", "kv_heads"), [(2, 6), (4, 1)])
def test_ranks_together_equal_the_dense_mask_forward_and_backward(ranks, kv_heads):
    run_case(ranks, attended, kv_heads=kv_heads)


@pytest.mark.parametrize("kept, attention, gathers", [
    ("none", 3, [1] * 3), ("full", 6, [1] * 6), ("selective", 3, [1] * 3 + [0] * 3)])
def test_keys_are_gathered_again_with_what_is_computed_again(kept, attention, gathers):
    """By each of three blocks. Selective checkpointing keeps attention's result and not the keys, which are large.
    Meanwhile queries are computed: one product forward, and two backward, of the input's gradient and the weight's."""
    result = run_case(2, exchanges, parallel={"cp": 2}, train={"activation_checkpointing": kept})
    assert result == {"attention": attention, "gathers": gathers, "sums": [2] * 3}
