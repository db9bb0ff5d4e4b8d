"""torch.compile for each block, and what has to be true of what enters a compiled graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor

from model.llama import Llama
from pipeline.config.parallel import ParallelConfig
from pipeline.config.training import TrainConfig

GRAPHS_A_PHASE = 32
"""That a block may have in each phase."""


def compiles(train: TrainConfig, device: torch.device, parallel: ParallelConfig | None = None) -> bool:
    """Whether blocks are compiled: as configured, or on GPUs; never under ZeRO 3, whose hooks break every graph."""
    if parallel is not None and parallel.engine == "deepspeed" and parallel.zero_stage == 3:
        return False
    return device.type == "cuda" if train.compile is None else train.compile


def compile_blocks(model: Llama, train: TrainConfig, options: dict[str, Any] | None = None) -> None:
    """Compile each block's computation; what FSDP2 does around a block stays outside. options: of torch.compile.

    Where phases have other shapes, each is compiled for its own: by itself, torch would make one graph for all sizes of
    the second on. Then a batch's number of documents is part of a shape too, of which a phase has a few (powers of
    two): torch, which gives up after so many graphs, is to allow for that many in each.
    """
    dynamic = False if train.phases else None
    if train.phases:
        limits = torch._dynamo.config
        limits.recompile_limit = max(limits.recompile_limit, GRAPHS_A_PHASE * (1 + len(train.phases)))
    for block in model.layers:
        block.forward = _on_arrival(torch.compile(block.forward, options=options, dynamic=dynamic))


def _on_arrival(compiled: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`compiled` for a block's input that may still be on its way from other ranks, as that of the first block is
    under tensor parallelism: the embedding's sums are scattered over the sequence asynchronously.

    NOTE: torch (2.12, 2.13) takes such an AsyncCollectiveTensor apart at the entry of a graph and traces the tensor
    inside it, which requires no gradient: the graph then has none for its input, and all that lies upstream, the
    embedding, gets zeros without a word (pytorch#191113). Older versions stop with an error instead. Waiting here costs
    nothing: a block's first operation reads the whole input. Gradients that arrive from other ranks are waited for by
    torch itself.
    """
    def forward(x: Tensor, *others: Any, **named: Any) -> Tensor:
        arrived: Tensor = _Arrival.apply(x) if isinstance(x, AsyncCollectiveTensor) else x
        return compiled(arrived, *others, **named)

    return forward


class _Arrival(torch.autograd.Function):
    """The plain tensor that an AsyncCollectiveTensor becomes, in the same memory and with its place in the graph of
    gradients, which its own `wait` forgets."""

    @staticmethod
    def forward(ctx: Any, x: AsyncCollectiveTensor) -> Tensor:
        return x.trigger_wait()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient
