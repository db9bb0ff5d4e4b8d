"""A model that is only called, spread over ranks: FSDP2 gathers one block's weights at a time, and lets them go again.

The ranks that hold one copy together must call it equally often, whatever each has to do: see `InStep`.
"""

from __future__ import annotations

from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from drover.model.attention.backend import Backend
from drover.model.config import ModelConfig
from drover.model.llama import Llama
from drover.pipeline.parallel.fsdp import placed, shard_units
from drover.pipeline.parallel.grid import Grid
from drover.pipeline.parallel.initial_values import InitialValues


def sharded(config: ModelConfig, values: InitialValues, grid: Grid, dtype: torch.dtype, attention: Backend) -> Llama:
    """A model in evaluation mode, without gradients, whose weights are spread over the shard ranks of `grid`. Each rank
    asks `values` for its own rows only.

    In calls a rank holds its rows, two neighbouring units (embedding, block, norm with output matrix) whole, and what
    is computed. The other copies of the model are independent of this one.
    """
    with torch.device("meta"):
        model = Llama(config)
    model.backend = attention
    model = model.to(dtype).eval().requires_grad_(False)
    shard_units(model, grid, dtype, dtype, again=True)
    return placed(model, values, grid)


class InStep:
    """Has all ranks of a group call their common model equally often. A context manager, which all of them enter.

    Before every call the ranks tell each other that there is one; who has none to make any more, on leaving, makes
    empty ones until nobody has. So they may have unequal work, texts of unequal length, and one may fail with an error
    of its own while the others go on. Everything inside is in inference mode: FSDP2 reuses its buffers, which are of
    one mode or the other.

    Attributes:
        broken: whether a call itself failed on this rank. The others wait for it and cannot go on.
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

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        try:
            self.broken = self.broken or self._calling
            if not self.broken and (error is None or isinstance(error, Exception)):
                self._keep_up()
        finally:
            self._mode.__exit__(kind, error, trace)

    def _keep_up(self) -> None:
        self._empty = True
        token = torch.zeros(1, 1, dtype=torch.int64, device=self.device)
        while self._somebody_calls(False):
            self.model(token, last_only=True)
        self._empty = False

    def _somebody_calls(self, this_one: bool) -> bool:
        said = torch.tensor(float(this_one), device=self.device)
        dist.all_reduce(said, op=dist.ReduceOp.MAX, group=self.group)
        return this_one or bool(said)  # who calls need not wait for the device

    def _before(self, *_: Any) -> None:
        if not self._empty:
            self._somebody_calls(True)
        self._calling = True

    def _after(self, *_: Any) -> None:
        self._calling = False
