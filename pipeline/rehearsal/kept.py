"""What blocks keep for the backward pass on GPUs, where a CPU's operators keep more.

torch's RMSNorm is one kernel on GPUs, which keeps its input and a number for each token; on CPUs it is made of
operators that keep two float32 copies. A compiled block keeps as much as one that is not, but for silu's result, which
it computes again: by torch's partitioner for inductor, which a test asks. The rehearsal takes these in the places of
the real ones. Nobody reads what they compute.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial


class _Kept(torch.autograd.Function):
    """Keeps all that it is given; its result is as large as the first, and gradients as what they are of."""

    @staticmethod
    def forward(ctx: Any, *given: Tensor) -> Tensor:
        ctx.save_for_backward(*given)
        return torch.zeros_like(given[0])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, ...]:
        return tuple(map(torch.zeros_like, ctx.saved_tensors))


def norm(module: nn.RMSNorm, x: Tensor) -> Tensor:
    """In the place of `nn.RMSNorm.forward`, as one kernel."""
    here: Tensor = x
    weight: Tensor = module.weight
    if isinstance(x, DTensor) and isinstance(weight, DTensor):
        here, weight = x.to_local(), weight.to_local(grad_placements=[Partial()])
    out: Tensor = _Kept.apply(here, weight, here.new_zeros((*here.shape[:-1], 1), dtype=torch.float32))
    return DTensor.from_local(out, x.device_mesh, x.placements, run_check=False) if isinstance(x, DTensor) else out


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """In the place of `drover.model.llama.swiglu`, as in a compiled block."""
    out: Tensor = _Kept.apply(gate, up)
    return out
