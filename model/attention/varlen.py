"""torch's attention over sequences of different lengths: flash kernels with the documents' offsets.

The default for documents on GPUs: all tokens of the batch are one row, causal inside each document, without repeated kv
heads or a mask. It needs half precision.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from drover.model.attention.backend import Backend, Documents, Where, moved

KNOWS_GROUPS = "enable_gqa" in inspect.signature(varlen_attn).parameters
"""torch 2.12 and later need an argument if there are fewer kv heads; 2.11 finds out itself."""


class Edges(NamedTuple):
    """Offsets of documents, or segments, in the row of all tokens, and of their keys in the row of all keys.

    edges: int32, from 0 to the number of tokens. Empty documents at the end pad their number to a power of two.
    longest: tokens of the longest document, rounded up to a power of two; the kernel's bound. key_edges, longest_keys:
    the same for keys; equal to those of queries for whole documents. If a segment has more keys than queries, the
    kernel aligns their ends.

    Numbers and lengths are rounded, because each new one would compile a graph again.
    """

    edges: Tensor
    longest: int
    key_edges: Tensor
    longest_keys: int


class Varlen(Backend):
    """`torch.nn.attention.varlen.varlen_attn`."""

    name = "varlen"
    segments = True
    operators = frozenset({torch.ops.torch_attn._varlen_attn.default})

    def unsupported(self, where: Where) -> str:
        """See Backend."""
        if where.device.type != "cuda":
            return f"needs a GPU, not a {where.device.type} device"
        if where.dtype not in (torch.bfloat16, torch.float16):
            return f"needs bfloat16, not {str(where.dtype).removeprefix('torch.')}"
        if where.head_dim % 8 or where.head_dim > 256:
            return f"needs heads of a multiple of 8 up to 256, not {where.head_dim}"
        capability = torch.cuda.get_device_capability(where.device)
        return "" if capability >= (8, 0) else f"needs compute capability 8.0, not {'.'.join(map(str, capability))}"

    def prepare(self, documents: Documents, dtype: torch.dtype) -> Edges:
        """See Backend."""
        device = documents.numbers.device
        edges, longest = _edges(documents.lengths, device), _longest(documents.lengths, documents.numbers.shape[1])
        if documents.keys is None:
            return Edges(edges, longest, edges, longest)
        return Edges(edges, longest, _edges(documents.key_lengths, device),
                     _longest(documents.key_lengths, documents.key_rows))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, prepared: Edges) -> Tensor:
        """See Backend."""
        edges, longest, key_edges, longest_keys = prepared
        options: dict[str, Any] = {"enable_gqa": True} if KNOWS_GROUPS else {}
        q_row, k_row, v_row = (tensor.flatten(0, 1) for tensor in (q, k, v))  # (tokens, heads, head_dim)
        seen = (-1, 0)  # all keys back, none ahead
        out: Any = varlen_attn(q_row, k_row, v_row, edges, key_edges, longest, longest_keys, window_size=seen,
                               **options)
        return out.view(q.shape)


def _edges(lengths: Sequence[int], device: torch.device) -> Tensor:
    edges = torch.full((power_of_two(len(lengths)) + 1,), sum(lengths), dtype=torch.int32, device="cpu")
    edges[0] = 0
    edges[1:len(lengths) + 1] = torch.tensor(lengths, dtype=torch.int64, device="cpu").cumsum(0)
    return moved(edges, device)


def _longest(lengths: Sequence[int], most: int) -> int:
    """The kernel's bound for lengths of at most `most`."""
    return min(power_of_two(max(lengths)), most)


def power_of_two(count: int) -> int:
    """The smallest power of two that is at least `count`."""
    return 1 << (count - 1).bit_length()
