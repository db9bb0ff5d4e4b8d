"""torch's attention over sequences of various lengths: flash kernels that are given where documents begin.

The way of documents on GPUs: every token of the batch in one row, causal inside each document, kv heads not repeated,
no mask. It takes half precision only.
"""

from __future__ import annotations

import inspect
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from model.attention.backend import Backend, Documents, Where

KNOWS_GROUPS = "enable_gqa" in inspect.signature(varlen_attn).parameters
"""torch 2.12 and later ask to be told that kv heads are fewer; 2.11 looks for itself."""


class Edges(NamedTuple):
    """Where documents begin in the row of all tokens.

    edges: int32, 0 first and the number of tokens last, which is repeated up to a power of two of documents: those have
    no tokens. longest: tokens of the longest document, rounded up to a power of two, the kernel's bound. before: how
    many keys before its own a query sees at most; -1 for all.

    The first two are rounded because a compiled graph is compiled again for a length that it has not seen.
    """

    edges: Tensor
    longest: int
    before: int


class Varlen(Backend):
    """`torch.nn.attention.varlen.varlen_attn`."""

    name: ClassVar[str] = "varlen"
    windows: ClassVar[bool] = True
    operators: ClassVar[frozenset[Any]] = frozenset({torch.ops.torch_attn._varlen_attn.default})

    def lacks(self, where: Where) -> str:
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
        lengths, device = documents.lengths, documents.numbers.device
        total = documents.numbers.numel()
        edges = torch.full((power_of_two(len(lengths)) + 1,), total, dtype=torch.int32, device="cpu")
        edges[0] = 0
        edges[1:len(lengths) + 1] = torch.tensor(lengths, dtype=torch.int64, device="cpu").cumsum(0)
        if device.type == "cuda":  # without waiting for what the device is doing
            edges = edges.pin_memory().to(device, non_blocking=True)
        before = -1 if documents.window is None else documents.window - 1
        return Edges(edges, min(power_of_two(max(lengths)), documents.numbers.shape[1]), before)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, prepared: Edges) -> Tensor:
        """See Backend."""
        edges, longest, before = prepared
        options: dict[str, Any] = {"enable_gqa": True} if KNOWS_GROUPS else {}
        q_row, k_row, v_row = (whole.flatten(0, 1) for whole in (q, k, v))  # (tokens, heads, head_dim)
        seen = (before, 0)  # so many keys back, none ahead
        out: Any = varlen_attn(q_row, k_row, v_row, edges, edges, longest, longest, window_size=seen, **options)
        joined: Tensor = out.view(q.shape)
        return joined


def power_of_two(count: int) -> int:
    """The least one that is not below `count`."""
    return 1 << (count - 1).bit_length()
