"""Which arithmetic the forward and backward pass use."""

from __future__ import annotations

import torch

from drover.model.devices import is_mps

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp64": torch.float64,
          "fp8": torch.bfloat16}
"""What a precision computes in; `fp8` is bfloat16 but for the products that drover.pipeline.parallel.fp8 converts."""


def choose_precision(wanted: str, device: torch.device) -> tuple[str, str]:
    """The arithmetic to compute in, a key of DTYPES, and why, for the log.

    `auto` takes bf16 only where the hardware multiplies it fast: on a CPU without AMX or AVX512-BF16 it runs at
    about a quarter of the fp32 speed.
    """
    if wanted != "auto":
        return wanted, f"{wanted} as configured"
    if device.type == "cuda":
        if torch.cuda.is_bf16_supported(including_emulation=False):
            return "bf16", "bf16: this GPU has it"
        return "fp32", "fp32: this GPU has no bf16"
    if is_mps(device):
        return "fp32", "fp32: all that is taken on mps"
    # The names of these queries are private to torch; where one is gone, fp32 is the safe answer.
    fast = any(getattr(torch.cpu, query, lambda: False)() for query in
               ("_is_amx_tile_supported", "_is_avx512_bf16_supported"))
    return ("bf16", "bf16: this CPU has fast bf16") if fast else ("fp32", "fp32: no fast bf16 here")
