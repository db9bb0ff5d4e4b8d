"""The precision of the forward and backward pass."""

from __future__ import annotations

import torch

from drover.model.devices import is_mps
from drover.model.kernels import vendor

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp64": torch.float64,
          "fp8": torch.bfloat16}
"""The element type of each precision. `fp8` is bfloat16, except in products that pipeline/parallel/fp8.py converts."""


def choose_precision(wanted: str, device: torch.device) -> tuple[str, str]:
    """The precision, a key of DTYPES, and the reason, for the log.

    `auto` uses bf16 only if the hardware multiplies it fast. A CPU without AMX or AVX512-BF16 computes bf16 at about a
    quarter of its fp32 speed. Intel's AVX512-BF16 reaches about half of it (benchmarks/RESULTS.md), AMD's exceeds it.
    """
    if wanted != "auto":
        return wanted, f"{wanted} as configured"
    if device.type == "cuda":
        if torch.cuda.is_bf16_supported(including_emulation=False):
            return "bf16", "bf16: this GPU has it"
        return "fp32", "fp32: this GPU has no bf16"
    if is_mps(device):
        return "fp32", "fp32: the only precision on mps"
    # These functions are private to torch; if one is missing, fp32 is the safe choice.
    amx, avx512 = (getattr(torch.cpu, query, lambda: False)() for query in
                   ("_is_amx_tile_supported", "_is_avx512_bf16_supported"))
    if amx or (avx512 and vendor() != "GenuineIntel"):
        return "bf16", "bf16: this CPU has fast bf16"
    return "fp32", "fp32: no fast bf16 here"
