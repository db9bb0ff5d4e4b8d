"""Products with a weight matrix, nearly all of a decoder's computation, and which library computes them on this CPU.

torch multiplies float32 matrices on CPUs by MKL, which uses only AVX2 on AMD's processors, even if they have AVX-512.
On an AMD EPYC (Zen 5) that gives 105 GFLOP/s per core, against 240 by oneDNN (120 if limited to AVX2). torch contains
oneDNN but uses it for other dtypes only, so we call it through the operator of torch's compiler. The arithmetic stays
float32. The order of sums differs, as between any two libraries.
"""

import functools
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable


class ByOnednn(NamedTuple):
    """Which products oneDNN computes instead of torch's own library.

    with_weight: x @ weight.T and the gradient of x. of_weight: the gradient of the weight. For it oneDNN first copies
    both matrices transposed, which under AVX2 costs as much as it saves.
    """

    with_weight: bool = False
    of_weight: bool = False


FASTER = {
    ("AuthenticAMD", "AVX512"): ByOnednn(with_weight=True, of_weight=True),
    ("AuthenticAMD", "AVX2"): ByOnednn(with_weight=True),
}
"""By vendor and instruction set, as measured (benchmarks/RESULTS.md). Intel's processors use Intel's MKL; nothing else
was measured.

This is a table and not a measurement at the start, because a measurement could differ between two starts. A resumed or
repeated run would then not be bit-equal.
"""


@functools.cache
def by_onednn() -> ByOnednn:
    """The choice for this processor and build of torch: looked up once per process, at the first product."""
    if not (torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")):
        return ByOnednn()
    return FASTER.get((vendor(), torch.backends.cpu.get_cpu_capability()), ByOnednn())


def vendor(description: Path = Path("/proc/cpuinfo")) -> str:
    """The processor's vendor ("AuthenticAMD", "GenuineIntel"); empty if it cannot be read."""
    try:
        with open(description, encoding="utf-8", errors="replace") as lines:
            result = next((line for line in lines if line.startswith("vendor_id")), "")
    except OSError:
        return ""
    return result.partition(":")[2].strip()


def product_library() -> str:
    """The choice in words: "oneDNN", "torch", or which products each of them computes."""
    if by_onednn().of_weight:
        return "oneDNN"
    return "with weights oneDNN, gradients of weights torch" if by_onednn().with_weight else "torch"


def onednn_product(x: Tensor, weight: Tensor) -> Tensor:
    """x @ weight.T by oneDNN, for plain float32 matrices on a CPU."""
    return torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")


class Linear(nn.Linear):
    """torch's linear layer without bias. It uses oneDNN where that is faster; it can then be differentiated once."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(..., inputs) -> (..., outputs)."""
        # In this order, because for single tokens the checks of `_plain` take longer than the product.
        if not torch.compiler.is_compiling() and by_onednn().with_weight and _plain(x, self.weight):
            out: Tensor = _Linear.apply(x, self.weight)
            return out
        return F.linear(x, self.weight)


def product(x: Tensor, weight: Tensor) -> Tensor:
    """x @ weight.T for x (..., inputs) and weight (outputs, inputs), without autograd.

    The gradient of x is product(gradient, weight.T).
    """
    if _plain(x, weight) and by_onednn().with_weight:
        return onednn_product(x, weight)
    return x @ weight.T


def weight_gradient(gradient: Tensor, x: Tensor) -> Tensor:
    """gradient.T @ x for gradient (rows, outputs) and x (rows, inputs), without autograd."""
    if _plain(gradient, x) and by_onednn().of_weight:
        return onednn_product(gradient.T, x.T)
    return gradient.T @ x


def add_weight_gradient(total: Tensor, gradient: Tensor, x: Tensor) -> None:
    """total += gradient.T @ x. The total may be float32 for bfloat16 gradients: in bfloat16, later addends would be
    lost."""
    if gradient.dtype == total.dtype and not (_plain(gradient, x) and by_onednn().of_weight):
        total.addmm_(gradient.T, x)  # without a temporary tensor of the total's size
    else:
        total += weight_gradient(gradient, x)


def _plain(x: Tensor, weight: Tensor) -> bool:
    """Whether both are plain float32 matrices on a CPU, which oneDNN can multiply.

    Not under torch.compile, which uses the operator itself and fails on ours. Not for tensors sharded over ranks
    (DTensor), which support torch's usual operators only.
    """
    return (
        not torch.compiler.is_compiling()
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
        gradient = gradient.contiguous()  # the gradient of a sum is one expanded number, and oneDNN needs real rows
        x_gradient = product(gradient, weight.T) if ctx.needs_input_grad[0] else None
        w_gradient = weight_gradient(gradient.flatten(0, -2), x.flatten(0, -2)) if ctx.needs_input_grad[1] else None
        return x_gradient, w_gradient
