"""Which backend computes attention inside documents, and which flash kernels, from the settings and the device."""

from __future__ import annotations

from contextlib import suppress
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.attention

from drover.model.attention.backend import Choice, Where, choose
from drover.pipeline.core.errors import UserError

OWN = "fa2"
"""The flash kernels that torch has itself."""
FLASH = {"fa3": ("flash_attn_interface", (9,)), "fa4": ("flash_attn.cute", (9, 10))}
"""Others, by name: the module that contains them, and the major compute capabilities that they support."""
KERNELS: Any = torch.nn.attention


def choose_attention(name: str, where: Where) -> Choice:
    """The backend that `train.attention` (name) selects.

    Raises:
        UserError: there is no such backend, or it cannot run here.
    """
    try:
        return choose(name, where)
    except ValueError as error:
        raise UserError(f"train.attention cannot be used here: {error}") from error


def choose_flash(name: str, device: torch.device) -> str:
    """Activate the flash kernels that `train.flash` (name) selects, for `varlen` and plain causal attention. Returns
    their name. `auto` takes FlashAttention 3 if it can be used, else torch's own.

    Raises:
        UserError: the kernels that `train.flash` names cannot be used here.
    """
    chosen = ("fa3" if not _unsupported("fa3", device) else OWN) if name == "auto" else name
    if chosen == OWN:
        return OWN
    if unsupported := _unsupported(chosen, device):
        raise UserError(f"train.flash={chosen} cannot be used here: it {unsupported}. Take train.flash=auto.")
    KERNELS.activate_flash_attention_impl(chosen.upper())
    return chosen


def _unsupported(name: str, device: torch.device) -> str:
    """Why kernels of FLASH cannot be used, as the rest of a sentence; empty if they can."""
    module, majors = FLASH[name]
    if device.type != "cuda":
        return f"needs a GPU, not a {device.type} device"
    if (major := torch.cuda.get_device_capability(device)[0]) not in majors:
        return f"is for compute capability {' and '.join(f'{number}.x' for number in majors)}, not {major}.x"
    if name.upper() not in getattr(KERNELS, "list_flash_attention_impls", list)():
        return f"is not known to torch {torch.__version__}"
    with suppress(ModuleNotFoundError):  # of the package that a module is in
        if find_spec(module) is not None:
            return ""
    return f"needs the module {module}, which is not installed"
