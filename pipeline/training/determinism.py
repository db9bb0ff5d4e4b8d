"""Bit-equal results of equal starts: settings of torch and its libraries, and the log's field about it.

On CPUs the same ranks and threads give the same bits by default. On GPUs the backward passes of flash and efficient
attention sum in any order, cuBLAS may choose kernels by its workspace, and NCCL algorithms by measurement:
https://docs.pytorch.org/docs/stable/notes/randomness.html
"""

from __future__ import annotations

import os

import torch

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
