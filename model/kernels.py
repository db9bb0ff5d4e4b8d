"""Which library computes float32 products on this CPU. This is the only place that decides it.

torch multiplies float32 matrices on CPUs by MKL, which uses only AVX2 on AMD's processors, even if they have AVX-512.
On an AMD EPYC (Zen 5) that gives 105 GFLOP/s per core, against 240 by oneDNN (120 if limited to AVX2). torch contains
oneDNN but uses it for other dtypes only, so we call it through the operator of torch's compiler. The arithmetic stays
float32. The order of sums differs, as between any two libraries.

`drover.model.attention.choosing` chooses the backend of attention.
"""

import functools
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor


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


def chosen() -> str:
    """The choice in words: "oneDNN", "torch", or which products each of them computes."""
    if by_onednn().of_weight:
        return "oneDNN"
    return "with weights oneDNN, gradients of weights torch" if by_onednn().with_weight else "torch"


def onednn_product(x: Tensor, weight: Tensor) -> Tensor:
    """x @ weight.T by oneDNN, for plain float32 matrices on a CPU."""
    return torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")
