"""Whether the same start gives the same bits: what torch and the libraries below it are told, and what a log says.

On CPUs the same ranks and threads give the same bits without being asked. On GPUs the backward passes of flash and
efficient attention add up in whatever order they finish, cuBLAS may choose by its workspace, and NCCL by measurement:
https://docs.pytorch.org/docs/stable/notes/randomness.html
"""

from __future__ import annotations

import os

import torch

from drover.pipeline.core.errors import UserError

WORKSPACES = (":4096:8", ":16:8")
"""What cuBLAS's workspace may be where it is to be deterministic: these are NVIDIA's words; the first is faster."""
REDUCTIONS = {"NCCL_ALGO": "Ring", "NCCL_PROTO": "Simple"}
"""One order of sums between GPUs whatever NCCL measures at a start. Ring, as every collective has it: Tree knows only
the all-reduce. Your own choice stays."""


def make_deterministic() -> None:
    """Ask for the same bits at every start on the same machine; to be called before anything is on a GPU.

    From here on operators that cannot be deterministic raise RuntimeError, and attention takes kernels that can:
    flash and efficient attention with a deterministic backward pass, cuDNN's not at all.

    Raises:
        UserError: CUBLAS_WORKSPACE_CONFIG is set to something that cannot be.
    """
    workspace = os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", WORKSPACES[0])
    if workspace not in WORKSPACES:
        raise UserError(f"train.deterministic is true, but CUBLAS_WORKSPACE_CONFIG is {workspace!r} in this process; "
                        f"cuBLAS is not deterministic with it. Unset it, or set it to {WORKSPACES[0]}.")
    for name, value in REDUCTIONS.items():
        os.environ.setdefault(name, value)
    torch.use_deterministic_algorithms(True)  # not warn_only: attention would keep its faster backward pass
    # Else a pass over all memory that is taken, for values that nothing of ours reads.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False
    import torch._inductor.config as inductor
    if hasattr(inductor, "deterministic"):  # newer torch: no choice of kernels by measuring them
        inductor.deterministic = True


def is_deterministic(device: torch.device, wanted: bool) -> bool:
    """Whether steps that are repeated on `device` give the same bits; for the log."""
    return device.type == "cpu" or wanted
