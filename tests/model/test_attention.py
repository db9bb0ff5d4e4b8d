"""The causal mask that continues a cache, and the cache. What attention computes is compared with transformers
(tests/formats) and over documents (test_backends)."""

from contextlib import nullcontext

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend

from drover.model.attention import sdpa
from drover.model.attention.layout import Layout
from drover.model.attention.module import KeyValueCache
from drover.model.config import ModelConfig
from tests.refusal import refused


def test_mask_is_left_out_where_plain_causal_is_meant():
    def mask(length, start):
        return Layout.causal(None, length, start, torch.device("cpu"), torch.float32).prepared

    assert mask(4, 0) is None and mask(1, 3) is None
    continued = mask(2, 3)
    assert (continued[0, 0] == 0).int().tolist() == [[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]


def test_a_cache_refuses_overflow():
    config = ModelConfig(dim=32, heads=4, kv_heads=2, layers=3)
    cache = KeyValueCache(capacity=5)
    cache.extend(*(torch.ones(2, 5, 2, 8),) * 2)
    assert config.layers * (cache.keys.nbytes + cache.values.nbytes) == config.kv_cache_bytes(2, 5, 4)
    refused(ValueError, r"holds 5 tokens; 5 \+ 1", cache.extend, *(torch.ones(2, 1, 2, 8),) * 2)


def test_new_shapes_are_not_left_to_cudnn(monkeypatch):
    allowed = []
    monkeypatch.setattr(sdpa, "sdpa_kernel", lambda kernels: allowed.append(kernels) or nullcontext())
    with FakeTensorMode():
        q, k = (torch.empty(1, length, 4, 8, device="cuda", dtype=torch.bfloat16) for length in (1, 9))
        sdpa.Sdpa().attend(q, k, k, None)
        assert not allowed  # training: cuDNN may be the fastest
        with torch.no_grad():
            assert sdpa.Sdpa().attend(q, k, k, None).shape == q.shape
    assert allowed == [sdpa.ANY_SHAPE] and SDPBackend.CUDNN_ATTENTION not in sdpa.ANY_SHAPE
