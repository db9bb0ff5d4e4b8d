"""Bit-equal results of equal starts: settings of torch and its libraries, and the log's field about it.

On CPUs the same ranks and threads give the same bits by default. On GPUs the backward passes of flash and efficient
attention sum in any order, cuBLAS may choose kernels by its workspace, and NCCL algorithms by measurement:
https://docs.pytorch.org/docs/stable/notes/randomness.html
"""

from __future__ import annotations

import os

import torch

from drover.pipeline.core.errors import UserError

WORKSPACES = (":4096:8", ":16:8")
"""The workspaces with which cuBLAS is deterministic, in NVIDIA's notation; the first is faster."""
REDUCTIONS = {"NCCL_ALGO": "Ring", "NCCL_PROTO": "Simple"}
"""A fixed order of sums between GPUs, independent of NCCL's measurements. Ring supports every collective; Tree only the
all-reduce. A value that the user has set stays."""


def make_deterministic() -> None:
    """Make every start on the same machine give the same bits. Call it before anything is on a GPU.

    Afterwards operators without a deterministic version raise RuntimeError, and attention uses deterministic kernels:
    flash and efficient attention with a deterministic backward pass, and never cuDNN's.

    Raises:
        UserError: CUBLAS_WORKSPACE_CONFIG has a value with which cuBLAS is not deterministic.
    """
    workspace = os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", WORKSPACES[0])
    if workspace not in WORKSPACES:
        raise UserError(f"train.deterministic is true, but CUBLAS_WORKSPACE_CONFIG is {workspace!r} in this process; "
                        f"cuBLAS is not deterministic with it. Unset it, or set it to {WORKSPACES[0]}.")
    for name, value in REDUCTIONS.items():
        os.environ.setdefault(name, value)
    torch.use_deterministic_algorithms(True)  # not warn_only: attention would keep its faster backward pass
    # It would fill all allocated memory in an extra pass, for values that our code never reads.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False
    import torch._inductor.config as inductor
    if hasattr(inductor, "deterministic"):  # newer torch: kernels are not chosen by measuring them
        inductor.deterministic = True


def is_deterministic(device: torch.device, wanted: bool) -> bool:
    """Whether repeated steps on `device` give the same bits; for the log."""
    return device.type == "cpu" or wanted
