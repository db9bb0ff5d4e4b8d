"""Attention over a sequence that is split over ranks; tests/parallel/matrix.py has all that is around attention."""

import itertools

import numpy as np
import pytest
import torch

from drover.model.attention.backend import Documents
from drover.pipeline.config.training import ParallelConfig
from drover.pipeline.parallel.context_parallel import ContextParallel, gathered, places
from drover.pipeline.parallel.grid import Grid
from tests.model import test_backends
from tests.model.test_backends import WAYS, inputs, numbered
from tests.parallel.groups import run_case
from tests.parallel.train_steps import exchanges

ROWS = {
    "one document": ((48,), (48,)),
    "of one token": ((1,) * 48, (1,) * 48),
    "mixed": ((1, 9, 1, 5, 32), (7, 41)),
    "shorter than the chunks": ((3, 5, 2, 7, 1, 6, 4, 3, 5, 12), (2,) * 24),
}


def attended(ranks, kv_heads, window):
    """Asserts on each rank that its part of attention, and of the gradients, is that of the dense mask: of each way and
    kind of row."""
    mesh = Grid(ranks, ParallelConfig(cp=ranks.world)).mesh["context"]
    for backend, rows in itertools.product(WAYS, ROWS.values()):
        index = places(rows, ranks.world)[:, ranks.rank, :, None, None]

        def mine(whole, index=index):
            return whole.gather(1, index.expand(-1, -1, *whole.shape[2:]))

        three = inputs(rows, kv_heads)
        expected = test_backends.attended(WAYS[0], three, rows, window=window)
        parts = [mine(whole.detach()).requires_grad_() for whole in three]
        context = ContextParallel(backend, mesh)
        documents = Documents(mine(numbered(rows)[..., None, None])[..., 0, 0],
                              [length for row in rows for length in row], window)
        result = context.attend(parts[0], *context.offer(*parts[1:]), context.prepare(documents, torch.float64))
        upstream = torch.randn(expected.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        gradients = torch.autograd.grad(expected, three, upstream)
        for ours, golden in zip((result, *torch.autograd.grad(result, parts, mine(upstream))), (expected, *gradients),
                                strict=True):
            torch.testing.assert_close(ours, mine(golden), rtol=0, atol=1e-12)


@pytest.mark.parametrize(("ranks", "kv_heads", "window"), [(2, 6, None), (4, 1, 7)])
def test_ranks_together_equal_the_dense_mask_forward_and_backward(ranks, kv_heads, window):
    run_case(ranks, attended, kv_heads=kv_heads, window=window)


def test_keys_beyond_a_window_are_left_out():
    whole, windowed = (gathered(((4096,),), 4, 3, window) for window in (None, 64))
    assert windowed.keys.lengths == (512 + 63, 512 + 63) and windowed.keys.rows < whole.keys.rows


def test_few_sizes_of_keys_are_met_however_documents_fall():
    """A compiled graph and the allocator see these."""
    random, sizes = np.random.default_rng(0), set()
    for _ in range(50):
        cuts = np.sort(random.choice(np.arange(1, 512), random.integers(0, 40), replace=False))
        sizes.add(gathered((tuple(np.diff([0, *cuts, 512]).tolist()),), 2, 1).keys.rows)
    assert len(sizes) <= 8 and all(size % 64 == 0 for size in sizes)


@pytest.mark.parametrize("kept, attention, gathers", [
    ("none", 3, [1] * 3), ("full", 6, [1] * 6), ("selective", 3, [1] * 3 + [0] * 3)])
def test_keys_are_gathered_again_with_what_is_computed_again(kept, attention, gathers):
    """By each of three blocks. Selective checkpointing keeps attention's result and not the keys, which are large.
    Meanwhile queries are computed: one product forward, and two backward, of the input's gradient and the weight's."""
    result = run_case(2, exchanges, parallel={"cp": 2}, train={"activation_checkpointing": kept})
    assert result == {"attention": attention, "gathers": gathers, "sums": [2] * 3}


@pytest.mark.slow
def test_compiled_blocks_compute_gradients_of_weights_while_activations_gradients_are_exchanged():
    """Under context parallelism all those that are known by then, with two of inputs; under tensor parallelism those of
    the feed-forward, and of attention. Forward, and where gradients are gathered, the next product needs the sum."""
    again = {"activation_checkpointing": "selective"}  # what is gathered again has the products that the sum had
    for axis, train, gathers, sums in (("cp", {}, [1], [6]), ("tp", {}, [0], [0, 3, 4]),
                                       ("cp", again, [1, 8], [1]), ("tp", again, [0, 5], [0, 2, 3])):
        result = run_case(2, exchanges, backend="inductor", parallel={axis: 2}, train=train)
        assert [sorted(set(result[kind])) for kind in ("gathers", "sums")] == [gathers, sums]
