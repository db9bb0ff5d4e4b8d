"""Which device computes, and where sums are made that it cannot make.

NOTE: `mps`, Apple's GPU, has no float64, and torch's process groups take none of its tensors. What needs either is done
in the host's memory. It has not been tried on a Mac.
"""

from __future__ import annotations

import torch


def is_mps(device: torch.device) -> bool:
    """Whether it is Apple's GPU."""
    return device.type == "mps"


def exact(device: torch.device) -> torch.device:
    """Where float64 is computed with, and what collectives take, for tensors on `device`: there, or on the CPU."""
    return torch.device("cpu") if is_mps(device) else device


def automatic() -> str:
    """What computes where nobody says what: a GPU by CUDA where there is one, else the CPU."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def find_device(name: str) -> torch.device:
    """The device with this name, as torch writes it.

    Raises ValueError, in words for the user, where it cannot be used.
    """
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:  # AssertionError: torch without CUDA
        raise ValueError(f"{name} cannot be used here: {str(error).splitlines()[0]}") from None
    return device
