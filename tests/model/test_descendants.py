"""Where Llama's descendants differ, each off by default: QK-norm, sliding windows, layers without rotary embedding."""

from typing import ClassVar

import pytest
import torch

from model.attention.backend import Backend, Where
from model.attention.choosing import choose
from model.attention.sdpa import Sdpa, dense_mask
from model.config import ModelConfig
from model.llama import Llama
from pipeline.training.engines.engine import without_gradient
from tests.tiny_models import DESCENDANT, opinionated

CPU = torch.device("cpu")
SHAPE = {"dim": 48, "layers": 1, "heads": 6, "kv_heads": 2, "ffn_dim": 64, "vocab_size": 50, "context_length": 32}


def tokens(seed=0, length=20):
    return torch.randint(50, (1, length), generator=torch.Generator().manual_seed(seed))


def test_a_window_is_so_many_keys_the_querys_own_included():
    seen = dense_mask(5, 0, None, CPU, window=3)[0, 0] == 0
    assert seen.int().tolist() == [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 1, 1, 0, 0], [0, 1, 1, 1, 0], [0, 0, 1, 1, 1]]
    behind = dense_mask(2, 3, None, CPU, window=3)[0, 0] == 0  # three tokens in a cache
    assert behind.int().tolist() == [[0, 1, 1, 1, 0], [0, 0, 1, 1, 1]]


def test_a_backend_that_knows_no_window_is_not_taken_for_one():
    windowed = Where(CPU, torch.float32, compiled=False, head_dim=8, windowed=True)
    with pytest.raises(ValueError, match=r"knows no sliding window\. Take auto, which is by_document here"):
        choose("tests.model.test_descendants:Ignorant", windowed)
    assert choose("auto", windowed).backend.windows and Backend.windows is False


class Ignorant(Sdpa):
    """Of windows."""

    windows: ClassVar[bool] = False


@torch.no_grad()
def test_a_layers_token_depends_on_those_in_its_window_and_two_layers_on_twice_as_many():
    for changes, reach in (({"sliding_window": 4}, 4), ({"sliding_window": 4, "layers": 2}, 7),
                           ({"sliding_window": 4, "layers": 2, "full_attention_interval": 2}, 20), ({}, 20)):
        model, ids = opinionated(ModelConfig(**{**SHAPE, **changes})).double(), tokens()
        before = model(ids)[0, -1]
        depends = []
        for place in range(20):
            changed = ids.clone()
            changed[0, place] = (ids[0, place] + 1) % 50
            depends.append(not torch.equal(model(changed)[0, -1], before))
        assert depends == [place >= 20 - reach for place in range(20)]


@torch.no_grad()
def test_without_rotation_the_order_of_what_came_before_is_not_seen():
    ids = tokens()
    swapped = ids[:, [1, 0, *range(2, 20)]]
    for interval, same in ((1, True), (2, False)):  # of one layer: every second is none
        model = opinionated(ModelConfig(**SHAPE, no_rope_layer_interval=interval)).double()
        assert torch.allclose(model(ids)[0, -1], model(swapped)[0, -1], rtol=0, atol=1e-12) is same


@torch.no_grad()
def test_normed_queries_and_keys_have_no_size_of_their_own():
    for qk_norm in (False, True):
        model = opinionated(ModelConfig(**SHAPE, qk_norm=qk_norm, norm_eps=1e-12)).double()
        before = model(tokens())
        for matrix in (model.layers[0].attention.wq, model.layers[0].attention.wk):
            matrix.weight.mul_(3)
        assert torch.allclose(model(tokens()), before, rtol=0, atol=1e-9) is qk_norm


def test_the_shape_counts_what_the_network_has():
    config = ModelConfig(**{**SHAPE, "layers": 6}, **DESCENDANT)
    assert sum(parameter.numel() for parameter in Llama(config).parameters()) == config.parameter_count
    assert config.layer_kinds == [(7, True), (7, False), (None, True), (7, False), (7, True), (None, False)]


def test_a_window_takes_from_attentions_operations():
    plain, windowed = (ModelConfig(**{**SHAPE, "layers": 4}, **changes) for changes in (
        {}, {"sliding_window": 8, "full_attention_interval": 4}))
    for causal, full, part in ((False, 32.0, 8.0), (True, 16.0, 7.0)):  # causal: 8 - 8 * 8 / 64
        assert plain.flops_per_token(32, causal) - windowed.flops_per_token(32, causal) == 12 * 48 * 3 * (full - part)
        assert plain.flops_per_token(8, causal) == windowed.flops_per_token(8, causal)


def test_scores_may_lack_a_gradient_where_nothing_is_seen():
    found = ["layers.0.attention.q_norm.weight", "layers.0.attention.k_norm.weight", "layers.0.attention.wq.weight"]
    assert without_gradient(found, [0, 0, 0], attending=False) == ""
    assert "q_norm.weight" in without_gradient(found, [0, 1, 1], attending=True)
