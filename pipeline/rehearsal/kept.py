"""Replacements that keep as much for the backward pass as blocks do on GPUs. A CPU's operators keep more.

On GPUs torch's RMSNorm is one kernel that keeps its input and one number per token. On CPUs it consists of operators
that keep two float32 copies. A compiled block keeps as much as an eager one, except silu's result, which it recomputes.
(A test compares this with torch's partitioner for inductor.) A rehearsal replaces the real functions by these; their
values are never read.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial


class _Kept(torch.autograd.Function):
    """Keeps all its inputs. The result has the shape of the first input, each gradient that of its input."""

    @staticmethod
    def forward(ctx: Any, *given: Tensor) -> Tensor:
        ctx.save_for_backward(*given)
        return torch.zeros_like(given[0])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, ...]:
        return tuple(map(torch.zeros_like, ctx.saved_tensors))


def norm(module: nn.RMSNorm, x: Tensor) -> Tensor:
    """Replaces `nn.RMSNorm.forward`, as one kernel."""
    here: Tensor = x
    weight: Tensor = module.weight
    if isinstance(x, DTensor) and isinstance(weight, DTensor):
        here, weight = x.to_local(), weight.to_local(grad_placements=[Partial()])
    out: Tensor = _Kept.apply(here, weight, here.new_zeros((*here.shape[:-1], 1), dtype=torch.float32))
    return DTensor.from_local(out, x.device_mesh, x.placements, run_check=False) if isinstance(x, DTensor) else out


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Replaces `drover.model.llama.swiglu`, as in a compiled block."""
    return _Kept.apply(gate, up)
