"""Which library makes float32 products on this CPU, decided in this one place.

torch multiplies float32 matrices on CPUs by MKL, which on AMD's processors uses AVX2 even where there is AVX-512:
105 GFLOP/s a core against 240 by oneDNN on an AMD EPYC (Zen 5), and 105 against 120 where both are held to AVX2. torch
has oneDNN built in but asks it for other dtypes only, so it is asked here, through the operator that torch's compiler
uses. The arithmetic stays float32; sums are in another order, as between any two libraries.

What computes attention is chosen in `drover.model.attention.choosing`.
"""

import functools
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor


class ByOnednn(NamedTuple):
    """Which products oneDNN makes instead of torch's own library.

    with_weight: x @ weight.T and the gradient of x. of_weight: the gradient of the weight, for which oneDNN first
    copies both matrices, transposed: under AVX2 that takes what it gains.
    """

    with_weight: bool = False
    of_weight: bool = False


FASTER = {
    ("AuthenticAMD", "AVX512"): ByOnednn(with_weight=True, of_weight=True),
    ("AuthenticAMD", "AVX2"): ByOnednn(with_weight=True),
}
"""By vendor and instruction set, as measured (benchmarks/RESULTS.md). Intel's processors keep MKL, which is at home
there; nothing else was measured.

A table, not a measurement at the start: that could end one way today and another tomorrow, and a run that goes on after
a restart, or one that is done again, would no longer have the same numbers to the last bit.
"""


@functools.cache
def by_onednn() -> ByOnednn:
    """What this processor and this build of torch are to use: looked up once in a process, at the first product."""
    if not (torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")):
        return ByOnednn()
    return FASTER.get((vendor(), torch.backends.cpu.get_cpu_capability()), ByOnednn())


def vendor(description: Path = Path("/proc/cpuinfo")) -> str:
    """Who made the processor, by its own words ("AuthenticAMD", "GenuineIntel"); empty where that cannot be read."""
    try:
        with open(description, encoding="utf-8", errors="replace") as lines:
            found = next((line for line in lines if line.startswith("vendor_id")), "")
    except OSError:
        return ""
    return found.partition(":")[2].strip()


def chosen() -> str:
    """The choice in words: "oneDNN", "torch", or which products each of them makes."""
    onednn = by_onednn()
    if onednn.with_weight == onednn.of_weight:
        return "oneDNN" if onednn.with_weight else "torch"
    parts = {"with weights": onednn.with_weight, "gradients of weights": onednn.of_weight}
    return ", ".join(f"{part} {'oneDNN' if taken else 'torch'}" for part, taken in parts.items())


def onednn_product(x: Tensor, weight: Tensor) -> Tensor:
    """x @ weight.T by oneDNN, for plain float32 matrices on a CPU."""
    out: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")
    return out
