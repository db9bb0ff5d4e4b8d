"""The device: the precision that it computes in, bit-equal results, and facts: peak FLOP/s, memory, compiled graphs."""

from __future__ import annotations

import os
import re
import resource
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from drover.model.linear import vendor
from drover.pipeline.core.console import readable
from drover.pipeline.core.errors import UserError

if TYPE_CHECKING:
    from drover.pipeline.parallel.ranks import Ranks
    from drover.pipeline.training.engine import Engine

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
    # These functions are private to torch; if one is missing, fp32 is the safe choice.
    amx, avx512 = (getattr(torch.cpu, query, lambda: False)() for query in
                   ("_is_amx_tile_supported", "_is_avx512_bf16_supported"))
    if amx or (avx512 and vendor() != "GenuineIntel"):
        return "bf16", "bf16: this CPU has fast bf16"
    return "fp32", "fp32: no fast bf16 here"


VARIABLES = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NCCL_ALGO": "Ring", "NCCL_PROTO": "Simple"}
"""cuBLAS's workspace, of which torch refuses any with which cuBLAS is not deterministic, and a fixed order of sums
between GPUs, independent of NCCL's measurements. Ring supports every collective; Tree only the all-reduce. A value that
the user has set stays."""


def make_deterministic() -> None:
    """Make every start on the same machine give the same bits. Call it before anything is on a GPU.

    Afterwards operators without a deterministic version raise RuntimeError, and attention uses deterministic kernels:
    flash and efficient attention with a deterministic backward pass, and never cuDNN's.
    """
    for name, value in VARIABLES.items():
        os.environ.setdefault(name, value)
    torch.use_deterministic_algorithms(True)  # not warn_only: attention would keep its faster backward pass
    # It would fill all allocated memory in an extra pass, for values that our code never reads.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False
    import torch._inductor.config as inductor
    if hasattr(inductor, "deterministic"):  # newer torch: kernels are not chosen by measuring them
        inductor.deterministic = True


PEAK_TFLOPS = {"H100": 989.5, "H200": 989.5, "A100": 312.0, "A800": 312.0, "H800": 989.5, "L40S": 362.0,
               "GB200": 2500.0, "GB300": 2500.0, "B200": 2250.0, "B300": 2250.0, "V100": 125.0, "RTX 4090": 165.2,
               "MI300X": 1307.4, "MI325X": 1307.4}
"""Dense bf16 peaks from the vendors' data sheets (V100: fp16; RTX 4090: fp32 accumulation), by a part of the device's
name; the first match counts. Other cards get no MFU, since a guess would mislead."""

LARGEST = 5
"""Modules that an out-of-memory message names."""
KINDS = {"model": "weights", "gradient": "gradients"}
"""Names of `Engine.held`, and their names in messages; all others are optimizer state."""


def peak_flops(device: torch.device) -> float | None:
    """Peak FLOP/s of the device in bf16, or None if it is not known for certain."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    if any(other in name for other in ("PCIe", "NVL", "Laptop", "4090 D")):
        return None  # these have other clock rates than the cards in the table
    return next((peak * 1e12 for key, peak in PEAK_TFLOPS.items() if key in name), None)


def memory_mb(device: torch.device) -> float:
    """Peak memory so far in MB: the device's on a GPU, the process's resident set elsewhere."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e6
    unit = 1 if sys.platform == "darwin" else 1024  # macOS counts bytes
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e6


def allocator_facts(device: torch.device) -> dict[str, float]:
    """Statistics of torch's allocator on a GPU, as fields of a step's line: its peak reserved memory in MB, and how
    often it had to free its cache and retry. Such retries are slow, and precede running out of memory. {} elsewhere."""
    if device.type != "cuda":
        return {}
    stats = torch.cuda.memory_stats(device)
    return {"memory_reserved_mb": round(stats["reserved_bytes.all.peak"] / 1e6, 1),
            "memory_retries": stats["num_alloc_retries"]}


def compiled_graphs() -> int:
    """The number of graphs that torch.compile has made in this process; 0 if it was never used."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return int(dynamo.counters["stats"]["unique_graphs"]) if dynamo else 0


def want_of_memory(error: torch.OutOfMemoryError, engine: Engine | None, ranks: Ranks, step: int, run: str) -> str:
    """An error message: torch's own, which has the device's totals, the content of this rank's memory, and how to find
    settings that need less.

    engine: None if it was still being built. step: the one that failed. run: arguments of `drover rehearse` for this
    run.
    """
    when = "for weights and the optimizer's states, before the first step"
    holds = ""
    if engine is not None:
        kinds = Counter[str]()
        modules = Counter[str]()  # summed over all blocks
        for name, kind, tensor in engine.held():
            if tensor.device == ranks.device:
                kinds[KINDS.get(kind, "optimizer's states")] += tensor.nbytes
                modules[".".join(re.sub(r"\.\d+\.", ".*.", name).split(".")[:-1][:3])] += tensor.nbytes
        when = f"in step {step}"
        holds = (f" This rank holds {', '.join(f'{readable(size)} of {kind}' for kind, size in kinds.items())}; the "
                 f"rest are gradients before they are reduced, gathered weights, activations and logits. The largest "
                 f"by module: {', '.join(f'{name} {readable(size)}' for name, size in modules.most_common(LARGEST))}.")
    on_gpu = ranks.device.type == "cuda"
    gpu = f"{torch.cuda.mem_get_info(ranks.device)[1] / 1e9:.0f}" if on_gpu else "<GB of a GPU>"
    return (f"The memory of rank {ranks.rank}'s device did not suffice {when} ({error}).{holds} For memory by "
            f"kind and settings that fit: drover rehearse {run} --ranks {ranks.world} --memory {gpu}")


@contextmanager
def memory_explained(engine: Engine | None, ranks: Ranks, step: int, run: str, *, first: bool) -> Iterator[None]:
    """If the code within runs out of memory, explain what the memory held.

    engine, step, run: as in `want_of_memory`. first: whether it is the first step of this start, or before it.

    Raises:
        UserError: in a first step, since another start would fail there too. In a later step torch's own error is
            raised, and the launcher restarts training.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        text = want_of_memory(error, engine, ranks, step, run)
        if first:
            raise UserError(text) from error
        print(text, file=sys.stderr, flush=True)
        raise
