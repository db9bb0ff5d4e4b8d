"""Grouped-query attention (Ainslie et al., 2023) with its weights, and the cache for decoding."""

from typing import Protocol

import torch
from torch import Tensor, nn

from drover.model.attention.layout import Layout
from drover.model.config import ModelConfig
from drover.model.linear import Linear


class Cache(Protocol):
    """The interface of one layer's cache for decoding."""

    @property
    def length(self) -> int:
        """Tokens seen so far, of the longest sequence."""

    def extend(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Append (batch, new, kv_heads, head_dim) each; returns all visible ones, (batch, keys, kv_heads, head_dim)
        each."""


class KeyValueCache:
    """One layer's keys and values of the tokens seen so far.

    It holds kv_heads heads, after the rotation and before any repetition: (batch, capacity, kv_heads,
    head_dim) each, allocated at the first use in the dtype and on the device of what arrives. Only for
    inference.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.length = 0
        self.keys: Tensor | None = None
        self.values: Tensor | None = None

    def extend(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Append (batch, new, kv_heads, head_dim) each; returns all so far, (batch, length, kv_heads,
        head_dim).

        Raises ValueError beyond the capacity.
        """
        batch, new, heads, head_dim = keys.shape
        if self.keys is None or self.values is None:
            self.keys = keys.new_empty(batch, self.capacity, heads, head_dim)
            self.values = torch.empty_like(self.keys)
        end = self.length + new
        if end > self.capacity:
            raise ValueError(f"The cache holds {self.capacity} tokens; {self.length} + {new} do not fit.")
        self.keys[:, self.length : end] = keys
        self.values[:, self.length : end] = values
        self.length = end
        return self.keys[:, :end], self.values[:, :end]


class Attention(nn.Module):
    """Causal self-attention whose key and value heads are each shared by a group of query heads.

    Args:
        layer: its number, from 0: some have a sliding window or no rotary embedding.
    """

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.head_dim = config.head_width
        self.rotates, self.windowed = config.rotates(layer), config.window_of(layer) is not None
        width, kv_width = config.heads * config.head_width, config.kv_heads * config.head_width
        self.wq = Linear(config.dim, width, bias=config.qkv_bias)
        self.wk = Linear(config.dim, kv_width, bias=config.qkv_bias)
        self.wv = Linear(config.dim, kv_width, bias=config.qkv_bias)
        self.wo = Linear(width, config.dim)
        self.q_norm, self.k_norm = (nn.RMSNorm(config.head_width, eps=config.norm_eps) if config.qk_norm else None
                                    for _ in range(2))

    def forward(self, x: Tensor, layout: Layout, cache: Cache | None = None) -> Tensor:
        """x: (batch, length, dim) -> the same; layout: of this forward pass; cache: this layer's, which is extended."""
        batch, length, _ = x.shape
        # Keys and values come first, so that their exchange with other ranks runs while queries are computed. The
        # number of heads is open (-1), because under tensor parallelism a rank holds only some of them.
        k = self._normed_and_rotated(self.wk(x).view(batch, length, -1, self.head_dim), self.k_norm, layout)
        v = self.wv(x).view(batch, length, -1, self.head_dim)  # (batch, length, kv_heads, head_dim), as k
        if cache is not None:
            k, v = cache.extend(k, v)
        k, v = layout.backend.offer(k, v)
        q = self._normed_and_rotated(self.wq(x).view(batch, length, -1, self.head_dim), self.q_norm, layout)
        # Each query's mean of its visible values, weighted by softmax(q k^T / sqrt(head_dim)), in the shape of q.
        seen = layout.backend.attend(q, k, v, layout.windowed if self.windowed else layout.prepared)
        return self.wo(seen.flatten(2))  # (batch, length, dim)

    def _normed_and_rotated(self, heads: Tensor, norm: nn.Module | None, layout: Layout) -> Tensor:
        """Queries or keys, (batch, length, heads, head_dim), normalized and rotated if the layer does so."""
        if norm is not None:
            heads = norm(heads)
        return layout.rotation(heads) if self.rotates else heads
