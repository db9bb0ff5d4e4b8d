"""Attention as the GPUs would compute it, where there are none."""

from __future__ import annotations

from typing import ClassVar

from model.attention.backend import Where
from model.attention.varlen import Varlen


class FlashKernel(Varlen):
    """Varlen's kernels without a GPU: torch knows what they return and keep (output and log-sum-exp), which is all that
    a rehearsal asks of them."""

    name: ClassVar[str] = "varlen"

    def lacks(self, where: Where) -> str:
        """See Backend. Of the GPU it is taken for granted that it is new enough (compute capability 8.0)."""
        if where.dtype.itemsize != 2:
            return f"needs bfloat16, not {str(where.dtype).removeprefix('torch.')}"
        return "" if where.head_dim % 8 == 0 and where.head_dim <= 256 else \
            f"needs heads of a multiple of 8 up to 256, not {where.head_dim}"


NAME = f"{FlashKernel.__module__}:{FlashKernel.__name__}"
"""As `train.attention`."""
