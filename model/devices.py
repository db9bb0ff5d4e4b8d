"""Which device computes."""

from __future__ import annotations

import torch


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
        if device.type not in ("cpu", "cuda"):
            raise ValueError(f"{name}: Drover computes on cpu and cuda only")
    except (RuntimeError, AssertionError) as error:  # AssertionError: torch without CUDA
        raise ValueError(f"{name} cannot be used here: {str(error).splitlines()[0]}") from None
    return device
