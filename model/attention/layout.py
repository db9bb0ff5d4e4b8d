"""Shared by all blocks of one forward pass: positions, and which tokens see which."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from drover.model.attention.backend import Backend, Documents
from drover.model.attention.sdpa import Sdpa, dense_mask
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
        windowed: the same for layers with a sliding window.

    NOTE: deliberately neither a tensor, a tuple nor a dataclass, like Rotation: mixed precision would cast their
    contents.
    """

    def __init__(self, rotation: Rotation, backend: Backend = PLAIN, prepared: Any = None,
                 windowed: Any = None) -> None:
        self.rotation, self.backend, self.prepared, self.windowed = rotation, backend, prepared, windowed

    @classmethod
    def of(cls, rotation: Rotation, backend: Backend, documents: Documents, dtype: torch.dtype,
           window: int | None = None) -> Layout:
        """Tokens see the earlier tokens of their own document. dtype: of queries, keys and values. window: of the
        layers that have one."""
        windowed = None if window is None else backend.prepare(documents.within(window), dtype)
        return cls(rotation, backend, backend.prepare(documents, dtype), windowed)

    @classmethod
    def causal(cls, rotation: Rotation, length: int, start: int, device: torch.device, dtype: torch.dtype,
               window: int | None = None) -> Layout:
        """Tokens start .. start + length - 1 see all tokens up to themselves; those before `start` are in a cache.
        window: of the layers that have one."""
        mask = None if start == 0 or length == 1 else dense_mask(length, start, None, device, dtype)
        beyond = window is not None and start + length > window
        return cls(rotation, PLAIN, mask, dense_mask(length, start, None, device, dtype, window) if beyond else mask)

    @classmethod
    def masked(cls, rotation: Rotation, mask: Tensor, positions: Tensor, window: int | None = None) -> Layout:
        """Tokens see what `mask`, (batch, 1, length, keys), allows, of a cache whose rows all begin at place 0.
        positions: of the tokens, (batch, length). window: of the layers that have one."""
        if window is None:
            return cls(rotation, PLAIN, mask)
        before = torch.arange(mask.shape[-1], device=mask.device) <= positions.unsqueeze(-1) - window
        return cls(rotation, PLAIN, mask, mask.masked_fill(before.unsqueeze(1), -torch.inf))
