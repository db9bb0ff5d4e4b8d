"""torch.compile for each block, and what has to be true of what enters a compiled graph."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor

from drover.model.llama import Llama
from drover.model.loss import Passes
from drover.pipeline.config.parallel import ParallelConfig
from drover.pipeline.config.training import TrainConfig

GRAPHS = 32
"""How many graphs the blocks of one kind may have in one phase. Training and validation have graphs of their own, and
so has each shape of a batch."""


@dataclass
class Calls:
    """How often compiled blocks were called, and how often Python ran them nevertheless."""

    all: int = 0
    eager: int = 0


CALLS = Calls()
"""In this process, since `compiled_share` was last asked."""


def compiled_share() -> float | None:
    """Share of the calls of compiled blocks since the last call of this function that ran as a graph; None without any.

    What is uncompiled on purpose (`uncompiled`) does not count.
    """
    share = 1 - CALLS.eager / CALLS.all if CALLS.all else None
    CALLS.all = CALLS.eager = 0
    return share


@contextmanager
def uncompiled() -> Iterator[None]:
    """Run blocks without their graphs: for shapes of which each would be compiled anew, and for what looks inside."""
    before = CALLS.all, CALLS.eager
    try:
        Passes.used = False
        with torch.compiler.set_stance("force_eager"):
            yield
    finally:
        Passes.used = True
        CALLS.all, CALLS.eager = before


def compiles(train: TrainConfig, device: torch.device, parallel: ParallelConfig | None = None) -> bool:
    """Whether blocks are compiled: as configured, or on GPUs; never under ZeRO 3, whose hooks break every graph."""
    if parallel is not None and parallel.engine == "deepspeed" and parallel.zero_stage == 3:
        return False
    return device.type == "cuda" if train.compile is None else train.compile


def compile_blocks(model: Llama, train: TrainConfig, options: dict[str, Any] | None = None) -> None:
    """Compile each block's computation as one graph; what cannot be in it is an error. What FSDP2 does around a block
    stays outside. options: of torch.compile. The loss's two passes over logits are compiled too.

    Blocks of one kind share their graphs. torch limits the graphs of one function; the limit is raised to what all
    kinds of blocks need in all phases, with and without checkpointing. Where phases have other shapes, each is compiled
    for its own: by itself, torch would make one graph for all sizes of the second on. Then a batch's number of
    documents is part of a shape too, of which a phase has a few (powers of two).
    """
    limits: Any = torch._dynamo.config
    blocks: list[Any] = list(model.layers)
    kinds = {(block.attention.windowed, block.attention.rotates) for block in blocks}
    graphs = GRAPHS * 2 * len(kinds) * (1 + len(train.phases or []))
    limits.recompile_limit = max(limits.recompile_limit, graphs)
    limits.accumulated_recompile_limit = max(limits.accumulated_recompile_limit, 2 * graphs)
    for block in blocks:
        computation = torch.compile(partial(_computation, block.forward), fullgraph=True, options=options,
                                    dynamic=False if train.phases else None)
        block.forward = partial(_call, computation)
    model.losses.passes = Passes.compiled()


def _computation(forward: Callable[..., Tensor], *arguments: Any, **named: Any) -> Tensor:
    if not torch.compiler.is_compiling():
        CALLS.eager += 1
    return forward(*arguments, **named)


def _call(compiled: Callable[..., Tensor], x: Tensor, *others: Any, **named: Any) -> Tensor:
    """Call a compiled block with an input that may still be on its way from other ranks, as that of the first block is
    under tensor parallelism: the embedding's sums are scattered over the sequence asynchronously.

    NOTE: torch (2.12, 2.13) takes such an AsyncCollectiveTensor apart at the entry of a graph and traces the tensor
    inside it, which requires no gradient: the graph then has none for its input, and all that lies upstream, the
    embedding, gets zeros without a word (pytorch#191113). Older versions stop with an error instead. Waiting here costs
    nothing: a block's first operation reads the whole input. Gradients that arrive from other ranks are waited for by
    torch itself.

    Raises:
        RuntimeError: blocks need more graphs than torch's limit; the text has its reason for the last recompilation.
    """
    CALLS.all += 1
    arrived: Tensor = _Arrival.apply(x) if isinstance(x, AsyncCollectiveTensor) else x
    try:
        return compiled(arrived, *others, **named)
    except torch._dynamo.exc.FailOnRecompileLimitHit as error:
        reason = torch._dynamo.utils.get_compilation_metrics()[-1].recompile_reason
        raise RuntimeError(f"torch reached its limit of compiled graphs. Its reason for the last recompilation: "
                           f"{reason}. Set train.compile=false to train without compiled blocks, and please report "
                           f"this.") from error


class _Arrival(torch.autograd.Function):
    """The plain tensor that an AsyncCollectiveTensor becomes, in the same memory and with its place in the graph of
    gradients, which its own `wait` forgets."""

    @staticmethod
    def forward(ctx: Any, x: AsyncCollectiveTensor) -> Tensor:
        return x.trigger_wait()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient
