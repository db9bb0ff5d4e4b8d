"""What blocks keep for the backward pass on GPUs, where a CPU's operators keep more.

torch's RMSNorm is one kernel on GPUs, which keeps its input and a number for each token; on CPUs it is made of
operators that keep two float32 copies. A compiled block computes silu's result again, and keeps no more than that less
(torch's partitioner for inductor: products, attention and what products multiply are kept). The rehearsal takes these
in their places, whose results nobody reads.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, x.new_zeros((*x.shape[:-1], 1), dtype=torch.float32))
        return torch.zeros_like(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, weight, _ = ctx.saved_tensors
        return torch.zeros_like(x), torch.zeros_like(weight)


def norm(module: nn.RMSNorm, x: Tensor) -> Tensor:
    """In the place of `nn.RMSNorm.forward`."""
    weight = module.weight
    if not isinstance(x, DTensor):
        return _Norm.apply(x, weight)
    assert isinstance(weight, DTensor)
    part = _Norm.apply(x.to_local(), weight.to_local(grad_placements=[Partial()]))
    return DTensor.from_local(part, x.device_mesh, x.placements, run_check=False)


class _Swiglu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return torch.zeros_like(up)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        return torch.zeros_like(gate), torch.zeros_like(up)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """In the place of `drover.model.llama.swiglu`, as in a compiled block."""
    out: Tensor = _Swiglu.apply(gate, up)
    return out
