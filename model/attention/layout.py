"""What the blocks of one forward pass share: positions, and which tokens see which."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from model.attention.backend import Backend, Documents
from model.attention.sdpa import Sdpa, dense_mask
from model.rope import Rotation

PLAIN = Sdpa()
"""For passes without documents."""


class Layout:
    """Made once in a forward pass, given to every block, read by attention alone.

    Attributes:
        rotation: of queries and keys, by the tokens' positions.
        backend: how attention is computed in this pass.
        prepared: what the backend made of the documents: a mask, cumulative lengths, blocks; None where plain causal
            attention is meant.

    NOTE: deliberately neither a tensor, a tuple nor a dataclass, like Rotation: mixed precision casts what is in those.
    """

    def __init__(self, rotation: Rotation, backend: Backend = PLAIN, prepared: Any = None) -> None:
        self.rotation, self.backend, self.prepared = rotation, backend, prepared

    @classmethod
    def of(cls, rotation: Rotation, backend: Backend, documents: Documents, dtype: torch.dtype) -> Layout:
        """Tokens see the earlier ones of their own document. dtype: of queries, keys and values."""
        return cls(rotation, backend, backend.prepare(documents, dtype))

    @classmethod
    def causal(cls, rotation: Rotation, length: int, start: int, device: torch.device, dtype: torch.dtype) -> Layout:
        """Tokens start .. start + length - 1 see all up to themselves; those before `start` are in a cache."""
        mask = None if start == 0 or length == 1 else dense_mask(length, start, None, device, dtype)
        return cls(rotation, PLAIN, mask)


def attend(q: Tensor, k: Tensor, v: Tensor, layout: Layout) -> Tensor:
    """Each query's mean of the values that it may see, weighed by softmax(q k^T / sqrt(head_dim)).

    q: (batch, length, heads, head_dim); k, v: (batch, keys, kv_heads, head_dim), rotated, with those of the cache in
    front. Returns the shape of q.
    """
    return layout.backend.attend(q, k, v, layout.prepared)
