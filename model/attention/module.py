"""Grouped-query attention (Ainslie et al., 2023) with its weights, which tokens see which, and a cache for decoding."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor, nn

from drover.model.attention.backend import Backend
from drover.model.attention.sdpa import Sdpa
from drover.model.config import ModelConfig
from drover.model.linear import Linear
from drover.model.rope import Rotation

PLAIN = Sdpa()
"""For passes without documents."""


class Layout:
    """Created once in a forward pass, given to every block, read by attention only.

    Attributes:
        rotation: of queries and keys, by the tokens' positions.
        backend: computes attention in this pass.
        prepared: the backend's form of the documents: a mask, cumulative lengths, blocks; None for plain causal
            attention.

    NOTE: deliberately neither a tensor, a tuple nor a dataclass, like Rotation: mixed precision would cast their
    contents.
    """

    def __init__(self, rotation: Rotation, backend: Backend = PLAIN, prepared: Any = None) -> None:
        self.rotation, self.backend, self.prepared = rotation, backend, prepared


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
        """Append (batch, new, kv_heads, head_dim) each; returns all so far, (batch, length, kv_heads, head_dim)."""
        batch, new, heads, head_dim = keys.shape
        if self.keys is None or self.values is None:
            self.keys = keys.new_empty(batch, self.capacity, heads, head_dim)
            self.values = torch.empty_like(self.keys)
        end = self.length + new
        assert end <= self.capacity, f"the cache holds {self.capacity} tokens"
        self.keys[:, self.length : end] = keys
        self.values[:, self.length : end] = values
        self.length = end
        return self.keys[:, :end], self.values[:, :end]


class Attention(nn.Module):
    """Causal self-attention whose key and value heads are each shared by a group of query heads."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.head_dim = config.head_width
        width, kv_width = config.heads * config.head_width, config.kv_heads * config.head_width
        self.wq = Linear(config.dim, width)
        self.wk = Linear(config.dim, kv_width)
        self.wv = Linear(config.dim, kv_width)
        self.wo = Linear(width, config.dim)

    def forward(self, x: Tensor, layout: Layout, cache: Cache | None = None) -> Tensor:
        """x: (batch, length, dim) -> the same; layout: of this forward pass; cache: this layer's, which is extended."""
        batch, length, _ = x.shape
        # Keys and values come first, so that their exchange with other ranks runs while queries are computed. The
        # number of heads is open (-1), because under tensor parallelism a rank holds only some of them.
        k = layout.rotation(self.wk(x).view(batch, length, -1, self.head_dim))
        v = self.wv(x).view(batch, length, -1, self.head_dim)  # (batch, length, kv_heads, head_dim), as k
        if cache is not None:
            k, v = cache.extend(k, v)
        k, v = layout.backend.offer(k, v)
        q = layout.rotation(self.wq(x).view(batch, length, -1, self.head_dim))
        # Each query's mean of its visible values, weighted by softmax(q k^T / sqrt(head_dim)), in the shape of q.
        seen = layout.backend.attend(q, k, v, layout.prepared)
        return self.wo(seen.flatten(2))  # (batch, length, dim)
