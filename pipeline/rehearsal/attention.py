"""Attention as the GPUs would compute it, where there are none."""

from __future__ import annotations

from typing import ClassVar

import torch

from drover.model.attention.backend import Where
from drover.model.attention.choosing import load
from drover.model.attention.varlen import Varlen
from drover.pipeline.errors import UserError


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
    """What stands for `train.attention` in a rehearsal of GPUs, and what to say of it; as
    drover.model.attention.choosing decides on a GPU that is new enough (compute capability 8.0).

    Raises:
        UserError: it could not run there either.
    """
    lack = _varlen_lacks(where)
    if name == "by_document" and where.compiled:
        raise UserError("train.attention is by_document, which cannot be compiled. Take auto, or train.compile=false.")
    if name == "varlen" and lack:
        raise UserError(f"train.attention is varlen, which {lack}. Take auto.")
    if name in ("auto", "varlen") and not lack:
        return NAME, ""
    if name == "auto" and not where.compiled:
        return "by_document", f"varlen {lack}: attention is by_document"
    if name in ("auto", "flex") and where.dtype != torch.float64 and not where.segmented:
        return NAME, "flex is rehearsed as varlen: both keep the output and its log-sum-exp"
    if ":" in name and (missing := _missing_here(name, where)):
        best = "sdpa" if lack else "varlen"
        return "sdpa" if lack else NAME, f"attention {name} {missing} here: it is rehearsed as {best}"
    return ("sdpa", f"varlen {lack}, nor does flex run: attention is sdpa") if name == "auto" else (name, "")


def _missing_here(name: str, where: Where) -> str:
    """What somebody else's backend lacks on this machine, which it may have on GPUs; nothing, if it cannot be loaded:
    then the engine says so."""
    try:
        return load(name).refusal(where)
    except ValueError:
        return ""


def _varlen_lacks(where: Where) -> str:
    if where.dtype not in (torch.bfloat16, torch.float16):
        return f"needs bfloat16, not {str(where.dtype).removeprefix('torch.')}"
    fits = where.head_dim % 8 == 0 and where.head_dim <= 256
    return "" if fits else f"needs heads of a multiple of 8 up to 256, not {where.head_dim}"
