"""Attention as the GPUs would compute it, where there are none."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar
from unittest import mock

import torch

from drover.model.attention.backend import Where
from drover.model.attention.choosing import choose, load
from drover.model.attention.varlen import Varlen
from drover.pipeline.core.errors import UserError


class FlashKernel(Varlen):
    """Varlen's kernels without a GPU: torch knows what they return and keep (output and log-sum-exp), which is all that
    a rehearsal asks of them."""

    name: ClassVar[str] = "varlen"

    def lacks(self, where: Where) -> str:
        """Nothing: it never computes."""
        return ""


NAME = f"{FlashKernel.__module__}:{FlashKernel.__name__}"
"""As `train.attention`."""


def on_gpus(name: str, where: Where) -> tuple[str, str]:
    """What stands for `train.attention` in a rehearsal of GPUs (of compute capability 8.0), and what to say of it.

    Raises:
        UserError: it could not run there either.
    """
    missing = _missing_here(name, where) if ":" in name else ""
    if ":" in name and not missing:
        return name, ""
    with mock.patch.object(torch.cuda, "get_device_capability", return_value=(8, 0)):
        try:
            choice = choose("auto" if missing else name, replace(where, device=torch.device("cuda")))
        except ValueError as error:
            raise UserError(f"train.attention cannot be had on GPUs: {error}") from error
    chosen, note = choice.backend.name, choice.fallback
    if missing:
        note = f"attention {name} {missing} here: it is rehearsed as {chosen}"
    elif chosen == "flex":
        note = "flex is rehearsed as varlen: both keep the output and its log-sum-exp"
    return NAME if chosen in ("varlen", "flex") else chosen, note


def _missing_here(name: str, where: Where) -> str:
    """What somebody else's backend lacks on this machine, which it may have on GPUs; nothing, if it cannot be loaded:
    then the engine says so."""
    try:
        return load(name).refusal(where)
    except ValueError:
        return ""
