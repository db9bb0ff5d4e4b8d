"""torch.compile for each block, the inputs that its graphs need, and the C or C++ compiler that it needs."""

from __future__ import annotations

import os
import shutil
import sysconfig
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor

from drover.model.llama import Llama
from drover.model.loss import Passes
from drover.pipeline.config.training import ParallelConfig, TrainConfig
from drover.pipeline.core.errors import UserError

GRAPHS = 32
"""How many graphs the blocks of one kind may have in one phase. Training, validation and each shape of a batch have
graphs of their own."""


@dataclass
class Calls:
    """How often compiled blocks were called, and how often they ran as plain Python."""

    all: int = 0
    eager: int = 0


INCLUDES = ("CPATH", "C_INCLUDE_PATH", "CPLUS_INCLUDE_PATH")
"""Variables with further folders in which compilers look for headers."""
CALLS = Calls()
"""In this process, since the last call of `compiled_share`."""


def compiled_share() -> float | None:
    """Share of the calls of compiled blocks that ran as a graph, since the last call of this function. None if there
    was no call.

    Calls inside `uncompiled` do not count.
    """
    share = 1 - CALLS.eager / CALLS.all if CALLS.all else None
    CALLS.all = CALLS.eager = 0
    return share


@contextmanager
def uncompiled() -> Iterator[None]:
    """Run blocks without their graphs: for shapes that change with every call, and for code that looks inside."""
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


def compile_blocks(model: Llama, train: TrainConfig, options: Any = None) -> None:
    """Compile each block's computation as one graph, and the loss's two passes over logits. Code that does not fit into
    one graph is an error. FSDP2's work around a block stays outside. options: of torch.compile.

    Blocks of one kind share their graphs. torch limits the graphs of one function; the limit is raised to what all
    kinds of blocks need in all phases, with and without checkpointing. With phases, each shape gets a graph of its own;
    by default torch would make one graph with dynamic sizes from the second shape on. The padded number of a batch's
    documents is then part of the shape: a phase has a few of them (powers of two).
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
    """Call a compiled block. Its input may still be in flight from other ranks: under tensor parallelism the
    embedding's sums are scattered over the sequence asynchronously.

    NOTE: torch (2.12, 2.13) unwraps such an AsyncCollectiveTensor when it enters a graph, and traces the tensor inside,
    which requires no gradient. The graph then computes no gradient for its input, and the embedding upstream silently
    gets zeros (pytorch#191113). Older versions stop with an error. Waiting here costs nothing, because a block's first
    operation reads the whole input. torch itself waits for gradients that arrive from other ranks.
    """
    CALLS.all += 1
    arrived: Tensor = _Arrival.apply(x) if isinstance(x, AsyncCollectiveTensor) else x
    return compiled(arrived, *others, **named)


class _Arrival(torch.autograd.Function):
    """Turns an AsyncCollectiveTensor into the plain tensor in the same memory. The result stays connected to the
    autograd graph; that of its own `wait` does not."""

    @staticmethod
    def forward(ctx: Any, x: AsyncCollectiveTensor) -> Tensor:
        return x.trigger_wait()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


def refuse_without_compiler(train: TrainConfig, device: torch.device) -> None:
    """Refuse a run that compiles its blocks if torch would find no compiler, or not the headers of Python.

    Raises:
        UserError: names what is missing. Otherwise the first step would end in a traceback of torch's.
    """
    if not compiles(train, device):
        return
    gpu = device.type == "cuda"
    # As torch's inductor and, for GPUs, Triton look for it.
    variable, names = ("CC", ("gcc", "clang")) if gpu else ("CXX", ("g++",))
    chosen = os.environ.get(variable)
    missing = []
    if not any(shutil.which(name) for name in ((chosen,) if chosen else names)):
        missing.append(f"{chosen} ({variable})" if chosen else " or ".join(names))
    header = Path(sysconfig.get_path("include"), "Python.h")
    if not header.exists() and os.environ.keys().isdisjoint(INCLUDES):
        missing.append(str(header))
    if not missing:
        return
    default = ", which is the default on GPUs" if train.compile is None else ""
    raise UserError(f"train.compile is on{default}, and torch.compile needs a compiler and the headers of Python, "
                    f"but this machine has no {' and no '.join(missing)}. Install what is missing (apt-get install g++ "
                    f"python3-dev), or set train.compile=false.")
