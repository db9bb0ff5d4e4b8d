"""Products with a weight matrix, which are nearly all of a decoder's work; on some CPUs twice as fast as torch's own.

torch multiplies float32 matrices on CPUs by MKL, which on AMD's processors does not use AVX-512: 212 GFLOP/s against
471 by oneDNN on two cores of an AMD EPYC (Zen 5). torch has oneDNN built in but asks it for other dtypes only, so it
is asked here, through the operator that torch's compiler uses. The arithmetic stays float32; sums are in another
order, as between any two libraries. Intel's processors keep MKL: there it was not measured.
"""

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable


def _onednn_is_faster() -> bool:
    processor = Path("/proc/cpuinfo")
    return (
        torch.backends.mkldnn.is_available()
        and torch.backends.mkl.is_available()
        and torch.backends.cpu.get_cpu_capability() == "AVX512"
        and processor.exists()
        and "AuthenticAMD" in processor.read_text()
    )


ONEDNN_IS_FASTER = _onednn_is_faster()
"""Whether this is such a processor, and torch such a build. Known at import, once: a compiler can rely on it."""


class Linear(nn.Linear):
    """torch's linear layer without bias, by `product` where that is to be preferred. Differentiable once there."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(..., inputs) -> (..., outputs)."""
        if prefers_onednn(x, self.weight):
            out: Tensor = _Linear.apply(x, self.weight)
            return out
        return F.linear(x, self.weight)


def product(x: Tensor, weight: Tensor) -> Tensor:
    """x @ weight.T for x (..., inputs) and weight (outputs, inputs), where autograd does not look.

    It does for the gradients too: that of x is product(gradient, weight.T), that of weight product(gradient.T, x.T).
    """
    if prefers_onednn(x, weight):
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")
        return out
    return x @ weight.T


def prefers_onednn(x: Tensor, weight: Tensor) -> bool:
    """Whether both are plain float32 matrices on a CPU where oneDNN is the faster library.

    Never under torch.compile, which has its own use for the operator and fails on ours, nor for tensors that are
    spread over ranks (DTensor): they know torch's usual operators only.
    """
    return (
        ONEDNN_IS_FASTER
        and not torch.compiler.is_compiling()
        and x.is_cpu
        and x.dtype == weight.dtype == torch.float32
        and x.numel() > 0
        and all(type(tensor) in (Tensor, nn.Parameter) for tensor in (x, weight))
    )


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        x = x.contiguous()
        ctx.save_for_backward(x, weight)
        return product(x, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        gradient = gradient.contiguous()  # of a sum it is one number, expanded: oneDNN wants real rows
        x_gradient = product(gradient, weight.T) if ctx.needs_input_grad[0] else None
        weight_gradient = None
        if ctx.needs_input_grad[1]:
            weight_gradient = product(gradient.flatten(0, -2).T, x.flatten(0, -2).T)
        return x_gradient, weight_gradient
