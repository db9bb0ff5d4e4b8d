"""A model for inference, sharded over ranks: FSDP2 all-gathers one block's weights at a time, and frees them again.

All ranks that share one replica must call it equally often, whatever work each has: see `InStep`.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from drover.model.attention.backend import Backend
from drover.model.config import ModelConfig
from drover.model.llama import Llama
from drover.pipeline.parallel.fsdp import InitialValues, placed, shard_units
from drover.pipeline.parallel.grid import Grid


def sharded(config: ModelConfig, values: InitialValues, grid: Grid, dtype: torch.dtype, attention: Backend) -> Llama:
    """A model in evaluation mode, without gradients, whose weights are sharded over the shard ranks of `grid`. Each
    rank asks `values` for its own rows only.

    In a call a rank holds its rows, two neighbouring whole units (embedding, block, norm with output matrix), and
    activations. Other replicas of the model are independent of this one.
    """
    with torch.device("meta"):
        model = Llama(config)
    model.backend = attention
    model = model.to(dtype).eval().requires_grad_(False)
    shard_units(model, grid, dtype, dtype, again=True)
    return placed(model, values, grid)


class InStep:
    """Lets all ranks of a group call their shared model equally often. A context manager that all of them enter.

    Before every call the ranks agree by an all-reduce that there is one. A rank without further calls makes empty ones
    when it leaves, until no rank has any. So ranks may have unequal work and texts of unequal length, and one may fail
    with an error of its own while the others continue. Everything inside runs in inference mode, because FSDP2 reuses
    its buffers and cannot mix both modes.

    Attributes:
        broken: whether a call of the model failed on this rank. The others wait for it and cannot continue.
    """

    def __init__(self, model: Llama, group: dist.ProcessGroup, device: torch.device) -> None:
        self.model, self.group, self.device = model, group, device
        self.broken, self._calling, self._empty = False, False, False
        self._mode: Any = None
        model.register_forward_pre_hook(self._before, prepend=True)
        model.register_forward_hook(self._after)

    def __enter__(self) -> InStep:
        self._mode = torch.inference_mode()
        self._mode.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: Any) -> None:
        try:
            self.broken = self.broken or self._calling
            if not self.broken and (kind is None or issubclass(kind, Exception)):
                self._keep_up()
        finally:
            self._mode.__exit__(kind, *error)

    def _keep_up(self) -> None:
        self._empty = True
        token = torch.zeros(1, 1, dtype=torch.int64, device=self.device)
        while self._somebody_calls(False):
            self.model(token, last_only=True)
        self._empty = False

    def _somebody_calls(self, this_one: bool) -> bool:
        flag = torch.tensor(float(this_one), device=self.device)
        dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=self.group)
        return this_one or bool(flag)  # a rank that calls need not wait for the device

    def _before(self, *_: Any) -> None:
        if not self._empty:
            self._somebody_calls(True)
        self._calling = True

    def _after(self, *_: Any) -> None:
        self._calling = False
