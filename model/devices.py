"""Which device computes, and which computes in float64 for it.

NOTE: `mps`, Apple's GPU, has no float64, and torch's process groups do not support its tensors. Both are done on the
CPU instead. It has not been tried on a Mac.
"""

from __future__ import annotations

import torch


def is_mps(device: torch.device) -> bool:
    """Whether it is Apple's GPU."""
    return device.type == "mps"


def exact(device: torch.device) -> torch.device:
    """The device for float64 and collectives with tensors on `device`: `device` itself, or the CPU."""
    return torch.device("cpu") if is_mps(device) else device


def automatic() -> str:
    """The default device: a GPU by CUDA if there is one, else the CPU."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def find_device(name: str) -> torch.device:
    """The device with this name, as torch writes it.

    Raises ValueError, with a message for the user, if it cannot be used.
    """
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:  # AssertionError: torch without CUDA
        raise ValueError(f"{name} cannot be used here: {str(error).splitlines()[0]}") from None
    return device
