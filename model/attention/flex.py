"""torch's flex attention: a kernel that is generated for a rule of who sees whom, and skips blocks where nobody does.

An option on GPUs, above all in float32, where no flash kernel is. It is always compiled there, and has no backward pass
on CPUs (torch 2.11 to 2.13), where it serves for comparison only.
"""

from __future__ import annotations

import functools
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from drover.model.attention.backend import Backend, Documents, Where


class Flex(Backend):
    """`torch.nn.attention.flex_attention`, with a block mask made once in a forward pass."""

    name: ClassVar[str] = "flex"
    windows: ClassVar[bool] = True
    # Inside a compiled block it is the first; around it, where only the kernel is compiled, the second.
    operators: ClassVar[frozenset[Any]] = frozenset({torch.ops.higher_order.flex_attention}) | {
        operator for operator in [getattr(torch._higher_order_ops, "inductor_compiled_code", None)] if operator}

    def lacks(self, where: Where) -> str:
        """See Backend."""
        if where.device.type != "cuda":
            return f"has no backward pass on a {where.device.type} device"
        if where.dtype == torch.float64:
            return "has no kernel for float64"
        capability = torch.cuda.get_device_capability(where.device)
        return "" if capability >= (7, 0) else f"needs compute capability 7.0, not {'.'.join(map(str, capability))}"

    def prepare(self, documents: Documents, dtype: torch.dtype) -> BlockMask:
        """See Backend: which blocks of 128 x 128 scores are all seen, in part, or not at all."""
        numbers = documents.numbers
        batch, length = numbers.shape
        make: Any = _compiled(create_block_mask) if numbers.is_cuda else create_block_mask
        first = first_tokens(numbers, documents.window)
        mask: BlockMask = make(rule(first), batch, None, length, length, device=str(numbers.device))
        return mask

    def attend(self, q: Tensor, k: Tensor, v: Tensor, prepared: BlockMask) -> Tensor:
        """See Backend."""
        kernel: Any = _compiled(flex_attention) if q.is_cuda and not torch.compiler.is_compiling() else flex_attention
        out: Tensor = kernel(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), block_mask=prepared,
                             enable_gqa=q.shape[2] != k.shape[2])
        return out.transpose(1, 2)


def first_tokens(numbers: Tensor, window: int | None = None) -> Tensor:
    """The place in its row of the first key that each token sees, where its document begins or the window does: (batch,
    length) int32 of `Documents.numbers`."""
    place = torch.arange(numbers.shape[1], dtype=torch.int32, device=numbers.device)
    begins = torch.ones_like(numbers, dtype=torch.bool)
    begins[:, 1:] = numbers[:, 1:] != numbers[:, :-1]
    first = torch.where(begins, place, 0).cummax(dim=1).values
    return first if window is None else first.maximum(place - window + 1)


def rule(first: Tensor) -> Any:
    """Who sees whom: a key from the first that the query sees up to the query. One look-up, where comparing two
    documents' numbers would be two."""

    def sees(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (query >= key) & (key >= first[row, query])

    return sees


@functools.cache
def _compiled(function: Any) -> Any:
    return torch.compile(function, dynamic=False)
