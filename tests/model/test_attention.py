"""Grouped-query attention against the formula, and the cache."""

import pytest
import torch

from model.attention.backend import Documents
from model.attention.layout import PLAIN, Layout
from model.attention.module import Attention, KeyValueCache
from model.config import ModelConfig
from model.rope import RotaryTable


def by_formula(
    attention: Attention, x: torch.Tensor, rotation, mask: torch.Tensor, heads: int
) -> torch.Tensor:
    """softmax(q k^T / sqrt(d) + mask) v, one head at a time."""
    batch, length, dim = x.shape
    width = dim // heads
    q = rotation(attention.wq(x).view(batch, length, heads, width))
    k = rotation(attention.wk(x).view(batch, length, -1, width))
    v = attention.wv(x).view(batch, length, -1, width)
    group = heads // k.shape[2]
    outputs = []
    for head in range(heads):
        scores = q[:, :, head] @ k[:, :, head // group].transpose(1, 2) / width**0.5
        weights = scores.masked_fill(~mask, float("-inf")).softmax(-1)
        outputs.append(weights @ v[:, :, head // group])
    return attention.wo(torch.cat(outputs, dim=-1))


@pytest.mark.parametrize("kv_heads", [1, 2, 6])
@pytest.mark.parametrize("packed", [False, True])
def test_equals_the_formula(kv_heads, packed):
    torch.manual_seed(0)
    config = ModelConfig(dim=48, heads=6, kv_heads=kv_heads, context_length=16)
    attention = Attention(config).double()
    x = torch.randn(2, 10, 48, dtype=torch.float64)
    rotation = RotaryTable(config).at(torch.arange(10)[None], torch.float64)
    documents = torch.tensor([[0] * 4 + [1] * 6, [5] * 9 + [7]]) if packed else None
    layout = Layout(rotation) if documents is None else Layout.of(rotation, PLAIN, Documents(documents), torch.float64)
    allowed = torch.ones(10, 10, dtype=torch.bool).tril().expand(2, 10, 10)
    if documents is not None:
        allowed = allowed & (documents[:, :, None] == documents[:, None, :])
    expected = by_formula(attention, x, rotation, allowed, heads=6)
    assert torch.allclose(attention(x, layout), expected, rtol=0, atol=1e-12)


def test_mask_is_left_out_where_plain_causal_is_meant():
    def mask(length, start):
        return Layout.causal(None, length, start, torch.device("cpu"), torch.float32).prepared

    assert mask(4, 0) is None and mask(1, 3) is None
    continued = mask(2, 3)
    assert (continued[0, 0] == 0).int().tolist() == [[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]


def test_cache_holds_unrepeated_heads_and_refuses_overflow():
    config = ModelConfig(dim=32, heads=4, kv_heads=2, layers=3)
    cache = KeyValueCache(capacity=5)
    cache.extend(torch.ones(2, 3, 2, 8), torch.ones(2, 3, 2, 8))
    keys, values = cache.extend(torch.zeros(2, 2, 2, 8), torch.zeros(2, 2, 2, 8))
    assert keys.shape == values.shape == (2, 5, 2, 8)
    assert keys[:, :3].eq(1).all() and keys[:, 3:].eq(0).all()
    assert config.layers * (cache.keys.nbytes + cache.values.nbytes) == config.kv_cache_bytes(2, 5, 4)
    with pytest.raises(ValueError, match=r"holds 5 tokens; 5 \+ 1"):
        cache.extend(torch.ones(2, 1, 2, 8), torch.ones(2, 1, 2, 8))
