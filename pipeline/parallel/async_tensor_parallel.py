"""Asynchronous tensor parallelism: torch's compiler splits a product that needs, or yields, other ranks' parts of the
sequence, and exchanges one piece while it computes another."""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import _symmetric_memory as symmetric_memory

from drover.pipeline.core.errors import UserError


def overlapping(group: dist.ProcessGroup, device: torch.device) -> dict[str, Any]:
    """The options of torch.compile that split the products of this tensor group; a collective of the group.

    Raises:
        UserError: its ranks cannot write to each other's memory. torch would then silently leave the products whole.
    """
    try:
        symmetric_memory.rendezvous(symmetric_memory.empty(1, device=device), group)
    except (RuntimeError, ValueError) as error:
        said = str(error).partition("\n")[0]
        raise UserError(f"parallel.async_tp needs GPUs of one node that reach each other's memory (NVLink), which the "
                        f"{group.size()} ranks of this tensor group on {device} do not ({said}). Set "
                        f"parallel.async_tp=false.") from error
    with warnings.catch_warnings():
        # torch (2.11 to 2.13) calls this deprecated, but its compiler still checks that it was called.
        warnings.simplefilter("ignore", FutureWarning)
        symmetric_memory.enable_symm_mem_for_group(group.group_name)
    return {"_micro_pipeline_tp": True}
