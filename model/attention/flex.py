"""torch's flex attention: a kernel generated from a mask function, which skips blocks without any visible pair.

An option on GPUs, mainly in float32, which has no flash kernel. It is always compiled there. On CPUs it has no backward
pass (torch 2.11 to 2.13) and only serves for comparison.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from drover.model.attention.backend import Backend, Documents, Where


class Flex(Backend):
    """`torch.nn.attention.flex_attention`, with one block mask for each forward pass."""

    name = "flex"
    # In a compiled block it is the first operator. In an eager block, where only the kernel is compiled, the second.
    operators = frozenset({torch.ops.higher_order.flex_attention}) | {
        operator for operator in [getattr(torch._higher_order_ops, "inductor_compiled_code", None)] if operator}

    def unsupported(self, where: Where) -> str:
        """See Backend."""
        if where.device.type != "cuda":
            return f"has no backward pass on a {where.device.type} device"
        if where.dtype == torch.float64:
            return "has no kernel for float64"
        capability = torch.cuda.get_device_capability(where.device)
        return "" if capability >= (7, 0) else f"needs compute capability 7.0, not {'.'.join(map(str, capability))}"

    def prepare(self, documents: Documents, dtype: torch.dtype) -> BlockMask:
        """See Backend: which blocks of 128 x 128 scores are visible fully, in part, or not at all."""
        numbers = documents.numbers
        batch, length = numbers.shape
        make: Any = _compiled(create_block_mask) if numbers.is_cuda else create_block_mask
        return make(rule(first_tokens(documents)), batch, None, length, length, device=str(numbers.device))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, prepared: BlockMask) -> Tensor:
        """See Backend."""
        kernel: Any = _compiled(flex_attention) if q.is_cuda and not torch.compiler.is_compiling() else flex_attention
        out: Tensor = kernel(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), block_mask=prepared,
                             enable_gqa=q.shape[2] != k.shape[2])
        return out.transpose(1, 2)


def first_tokens(documents: Documents) -> Tensor:
    """The position of the first token of each token's document: (batch, length) int32."""
    place = torch.arange(documents.numbers.shape[1], dtype=torch.int32, device=documents.numbers.device)
    return torch.where(documents.begins, place, 0).cummax(dim=1).values


def rule(first: Tensor) -> Any:
    """The mask function: a query sees the keys from its first one up to itself. This needs one look-up; comparing the
    numbers of two documents would need two."""

    def sees(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (query >= key) & (key >= first[row, query])

    return sees


@functools.cache
def _compiled(function: Any) -> Any:
    return torch.compile(function, dynamic=False)
