"""Attention over a sequence that is split over ranks, one rank after another in this process; tests/parallel/matrix.py
has the ranks, and all that is around attention."""

import numpy as np
import pytest
import torch

from drover.model.attention.backend import Documents, Where
from drover.model.attention.choosing import choose
from drover.model.attention.layout import Layout, attend
from drover.model.attention.sdpa import Sdpa
from drover.model.config import ModelConfig
from drover.pipeline.core.errors import UserError
from drover.pipeline.data.sampling.batch import pack
from drover.pipeline.parallel.attention import choose_attention
from drover.pipeline.parallel.context_parallel import _sum, gathered, part_of, places
from tests.model.agreement import agree
from tests.model.test_backends import WAYS, inputs, names, numbered
from tests.model.varlen_on_cpu import NAME
from tests.parallel.groups import run_case
from tests.refusal import refused

ROWS = {
    "one document": ((48,), (48,)),
    "of one token": ((1,) * 48, (1,) * 48),
    "mixed": ((1, 9, 1, 5, 32), (7, 41)),
    "shorter than the chunks": ((3, 5, 2, 7, 1, 6, 4, 3, 5, 12), (2,) * 24),
}
CPU = torch.device("cpu")


def by_ranks(whole, index):
    """(ranks, rows, length / ranks, ...) of (rows, length, ...)."""
    row = torch.arange(len(whole))[:, None]
    return torch.stack([whole[row, index[:, rank]] for rank in range(index.shape[1])])


class Packed(torch.autograd.Function):
    """What a rank makes of the gathered keys, without the gathering."""

    @staticmethod
    def forward(ctx, whole, index, uses):
        """Rows of `whole`, by number."""
        ctx.save_for_backward(uses)
        return whole.index_select(0, index)

    @staticmethod
    def backward(ctx, gradient):
        """Sums of what is said of each row."""
        return _sum((gradient,), *ctx.saved_tensors)[:, 0], None, None


def attended(backend, three, rows, ranks, window):
    """All ranks' outputs, put together again, as each computes its own from what it gathers."""
    index = places(rows, ranks)
    q, k, v = (by_ranks(whole, index) for whole in three)
    out = torch.empty(three[0].shape, dtype=torch.float64)
    row = torch.arange(len(rows))[:, None]
    for rank in range(ranks):
        found = gathered(rows, ranks, rank, window)
        segments = Documents(torch.zeros(1, q[rank].shape[:2].numel()), found.lengths, window, found.keys)
        keys, values = (Packed.apply(whole.flatten(0, 2), torch.from_numpy(found.index), torch.from_numpy(found.uses))
                        for whole in (k, v))
        # What no query may see. As numbers, since 0 x NaN is NaN in a dense mask's product.
        unseen = torch.arange(found.keys.rows) >= sum(found.keys.lengths)
        keys, values = (whole.masked_fill(unseen[:, None, None], 1e3)[None] for whole in (keys, values))
        mine = backend.attend(q[rank].flatten(0, 1)[None], keys, values, backend.prepare(segments, torch.float64))
        out = out.index_put((row, index[:, rank]), mine.view(q[rank].shape))
    return out


@pytest.mark.parametrize(("ranks", "kv_heads", "window"), [(2, 6, None), (4, 1, 7)])
@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)
@pytest.mark.parametrize("backend", WAYS, ids=names)
def test_segments_together_equal_the_dense_mask_forward_and_backward(backend, rows, ranks, kv_heads, window):
    three = inputs(rows, kv_heads)
    layout = Layout.of(None, Sdpa(), Documents(numbered(rows)), torch.float64, window)
    agree(attended(backend, three, rows, ranks, window), attend(*three, layout, windowed=window is not None), three)


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


def windows():
    random = np.random.default_rng(0)
    return [(random.integers(0, 384, 49), np.array([5, 6, 30])), (random.integers(0, 384, 49), np.array([], dtype=int))]


@pytest.mark.parametrize("across", [False, True])
def test_parts_of_a_batch_hold_every_token_with_its_label_and_position(across):
    whole = pack(windows())
    parts = [part_of(whole, 4, rank, across) for rank in range(4)]
    index = places(parts[0].lengths, 4)
    for name in ("tokens", "labels", "positions"):
        joined = torch.cat([getattr(part, name) for part in parts], dim=1)
        expected = torch.arange(48).expand(2, 48) if across and name == "positions" else getattr(whole, name)
        assert torch.equal(torch.empty_like(joined).scatter_(1, index.flatten(1), joined), expected), name
    assert all(part.targets == whole.targets for part in parts), "every rank knows the group's number"
    assert parts[0].lengths == (((48,), (48,)) if across else whole.lengths)
    micro_batches = list(parts[1].split(1))
    assert [batch.lengths for batch in micro_batches] == [(row,) for row in parts[1].lengths]


@pytest.mark.parametrize("kept, attention, gathered", [("none", 1, 1), ("full", 2, 2), ("selective", 1, 2)])
def test_keys_are_gathered_again_with_what_is_computed_again(kept, attention, gathered):
    """For each of three blocks. Selective checkpointing keeps attention's result and not the keys, which are large."""
    found = run_case(2, "", {"body": "tests.parallel.train_steps:attention_calls", "steps": 1, "parallel": {"cp": 2},
                             "train": {"activation_checkpointing": kept}})
    assert found == {"attention": 3 * attention, "gathered": 3 * gathered}


def computed_meanwhile(**settings):
    """By the kind of exchange, the different numbers of products that stand between its begin and the wait for it."""
    found = run_case(2, "", {"body": "tests.parallel.train_steps:computed_meanwhile", **settings})
    return {kind: sorted(set(counts)) for kind, counts in found.items()}


def test_queries_are_computed_while_keys_and_values_are_exchanged():
    """One product forward, and two backward: of the input's gradient, and of the weight's."""
    assert computed_meanwhile(parallel={"cp": 2}) == {"gathers": [1], "sums": [2]}


@pytest.mark.slow
def test_compiled_blocks_compute_gradients_of_weights_while_activations_gradients_are_exchanged():
    """Under context parallelism all those that are known by then, with two of inputs; under tensor parallelism those of
    the feed-forward, and of attention. Forward, and where gradients are gathered, the next product needs the sum."""
    assert computed_meanwhile(backend="inductor", parallel={"cp": 2}) == {"gathers": [1], "sums": [6]}
    assert computed_meanwhile(backend="inductor", parallel={"tp": 2}) == {"gathers": [0], "sums": [0, 3, 4]}
    # What is gathered again has the products beside it that were beside the sum.
    again = {"backend": "inductor", "train": {"activation_checkpointing": "selective"}}
    assert computed_meanwhile(**again, parallel={"cp": 2}) == {"gathers": [1, 8], "sums": [1]}
    assert computed_meanwhile(**again, parallel={"tp": 2}) == {"gathers": [0, 5], "sums": [0, 2, 3]}


@pytest.mark.slow
def test_other_documents_are_not_compiled_anew():
    """Twice for all blocks and steps: for the first shapes, and for those of other lengths. The loss has two graphs."""
    found = run_case(2, "", {"body": "tests.parallel.train_steps:graphs", "steps": 12, "parallel": {"cp": 2},
                             "train": {"attention": NAME}})
    assert 3 <= found["graphs"] <= 5


def test_backends_that_know_no_segments_are_not_taken():
    where = Where(CPU, torch.float32, compiled=False, head_dim=64, segmented=True)
    assert choose("auto", where).backend.name == "by_document"
    refused(UserError, r"'flex' knows no context parallelism\. Take auto, which is by_document here", choose_attention,
            "flex", ModelConfig(), CPU, torch.float32, compiled=False, segmented=True)
