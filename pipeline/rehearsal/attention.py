"""The attention of GPUs, for estimates on machines without any."""

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
    """Varlen's kernels without a GPU. A rehearsal needs only the shapes of their results and of what they keep (output
    and log-sum-exp), which torch knows."""

    name: ClassVar[str] = "varlen"

    def lacks(self, where: Where) -> str:
        """Nothing: it never computes."""
        return ""


NAME = f"{FlashKernel.__module__}:{FlashKernel.__name__}"
"""As `train.attention`."""


def on_gpus(name: str, where: Where) -> tuple[str, str]:
    """The backend that replaces `train.attention` in a rehearsal of GPUs (of compute capability 8.0), and a note about
    it.

    Raises:
        UserError: GPUs cannot run it either.
    """
    missing = _missing_here(name, where) if ":" in name else ""
    if ":" in name and not missing:
        return name, ""
    with mock.patch.object(torch.cuda, "get_device_capability", return_value=(8, 0)):
        try:
            choice = choose("auto" if missing else name, replace(where, device=torch.device("cuda")))
        except ValueError as error:
            raise UserError(f"train.attention cannot be used on GPUs: {error}") from error
    chosen, note = choice.backend.name, choice.fallback
    if missing:
        note = f"attention {name} {missing} here: it is rehearsed as {chosen}"
    elif chosen == "flex":
        note = "flex is rehearsed as varlen: both keep the output and its log-sum-exp"
    return NAME if chosen in ("varlen", "flex") else chosen, note


def _missing_here(name: str, where: Where) -> str:
    """Why a plugin's backend cannot run on this machine; GPUs may run it. Empty if it cannot be loaded, which the
    engine reports."""
    try:
        return load(name).refusal(where)
    except ValueError:
        return ""
