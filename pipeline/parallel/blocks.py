"""How a block runs: which kernels compute its attention, what its forward pass keeps for the backward pass and what is
computed again (activation checkpointing), and whether torch.compile makes a graph of it, with the compiler for that."""

from __future__ import annotations

import logging
import os
import shutil
import sysconfig
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.nn.attention
from torch import Tensor, nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.fx import traceback
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from drover.model.attention.backend import Choice, Where, choose
from drover.model.attention.module import PLAIN
from drover.model.llama import Llama
from drover.model.loss import Passes
from drover.pipeline.config.training import Activation, ParallelConfig, TrainConfig
from drover.pipeline.core.errors import UserError

PRODUCT = "product"
"""The key of torch's annotations that holds a product's name: the last part of the name of the layer that computes it.
torch keeps an annotation while the layer runs. torch.compile carries it along with the operators, where it would not
see an attribute that Python sets."""

# An fp8 product is `mm` of torchao's tensors in eager blocks, and `_scaled_mm` in a graph.
PRODUCT_OPERATORS = {torch.ops.aten.mm.default, torch.ops.aten._scaled_mm.default}
if hasattr(torch.ops.mkldnn, "_linear_pointwise"):  # the operator by which drover.model.linear calls oneDNN
    PRODUCT_OPERATORS.add(torch.ops.mkldnn._linear_pointwise.default)
SUM_OPERATORS = {torch.ops._c10d_functional.reduce_scatter_tensor.default}
"""The operator that adds up the partial sums of a product whose weight is split by rows over ranks."""
SUMMED = {"wo", "w2"}
"""The products whose weights tensor parallelism splits by rows."""


def checkpoint_activations(model: Llama, train: TrainConfig, always_kept: Sequence[Activation] = (),
                           tensor: int = 1) -> None:
    """Apply `train.activation_checkpointing` to every n-th block (`train.recomputed_blocks`), in place. Results are
    bit-equal with and without it.

    always_kept: results that are kept whatever the configuration says. tensor: ranks of a tensor-parallel group. With
    several ranks, the sum over ranks of wo and w2 is kept instead of the product: a rank holds its share of that sum,
    while its partial sum would be as large as the whole.
    """
    if train.activation_checkpointing == "none":
        return
    extra: dict[str, Any] = {}
    chosen = train.kept_activations if train.activation_checkpointing == "selective" else []
    if chosen or always_kept:
        policy = _Policy(frozenset([*chosen, *always_kept]), model.backend.operators | PLAIN.operators,
                         SUMMED if tensor > 1 else set())
        # With torch.compile it warns that nothing may work in place in there; nothing of a block does.
        logging.getLogger("torch._higher_order_ops.wrap").setLevel(logging.ERROR)
        extra["context_fn"] = partial(create_selective_checkpoint_contexts, policy)
    blocks: list[Any] = list(model.layers)  # Any: forward is replaced on the instances
    for layer, block in zip(model.part.layers, blocks, strict=True):
        if layer % train.recomputed_blocks == 0:
            if extra:
                _name_products(block)
            # Replacing forward on the instance, not wrapping the module, keeps the parameters' published names.
            block.forward = partial(checkpoint, block.forward, use_reentrant=False, preserve_rng_state=False, **extra)


def _name_products(block: nn.Module) -> None:
    """Let each linear layer note its name while it runs, whoever calls it and however often.

    The name is an attribute, and the class annotates with it. So blocks that differ in nothing else share a compiled
    graph. They would not if each layer had a function of its own, because torch.compile guards functions by identity.
    """
    for name, layer in block.named_modules():
        if isinstance(layer, nn.Linear):
            named: Any = layer
            named.product, named.__class__ = name.rpartition(".")[2], _named(type(named))  # type: ignore[arg-type]


@cache
def _named(kind: type[nn.Linear]) -> type[nn.Linear]:
    """A linear layer of `kind` that notes its `product` while it runs."""
    class Named(kind):  # type: ignore[misc, valid-type]
        def forward(self, x: Tensor) -> Tensor:
            with noting_product(self):
                return super().forward(x)

    Named.__name__ = Named.__qualname__ = kind.__name__
    return Named


def noting_product(layer: nn.Module) -> AbstractContextManager[None]:
    """Note the layer's name while its product is computed, if it has one."""
    return traceback.annotate({PRODUCT: layer.product} if hasattr(layer, "product") else {})


class _Policy:
    """Keeps the results named in `kept`.

    attention: the operators that compute attention. summed: the products that are sums over ranks.
    """

    def __init__(self, kept: frozenset[str], attention: frozenset[Any], summed: Set[str]) -> None:
        self.kept, self.attention, self.summed = kept, attention, summed

    def __call__(self, context: Any, operator: Any, *arguments: Any, **options: Any) -> CheckpointPolicy:
        if operator in self.attention:
            return _policy("attention" in self.kept)
        if operator in PRODUCT_OPERATORS or operator in SUM_OPERATORS:
            product = (traceback.get_current_meta().get("custom") or {}).get(PRODUCT)
            return _policy(product in self.kept and (product in self.summed) == (operator in SUM_OPERATORS))
        return CheckpointPolicy.PREFER_RECOMPUTE


def _policy(keep: bool) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE


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

    Blocks share their graphs. torch limits the graphs of one function; the limit is raised to what blocks need in all
    phases, with and without checkpointing. With phases, each shape gets a graph of its own;
    by default torch would make one graph with dynamic sizes from the second shape on. The padded number of a batch's
    documents is then part of the shape: a phase has a few of them (powers of two).
    """
    limits: Any = torch._dynamo.config
    graphs = GRAPHS * 2 * (1 + len(train.phases or []))
    limits.recompile_limit = max(limits.recompile_limit, graphs)
    limits.accumulated_recompile_limit = max(limits.accumulated_recompile_limit, 2 * graphs)
    for block in model.layers:
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

    Raises:
        RuntimeError: blocks need more graphs than torch's limit. The text has torch's reason for the last
            recompilation.
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


OWN = "fa2"
"""The flash kernels that torch has itself."""
FLASH = {"fa3": ("flash_attn_interface", (9,)), "fa4": ("flash_attn.cute", (9, 10))}
"""Others, by name: the module that contains them, and the major compute capabilities that they support."""
KERNELS: Any = torch.nn.attention


def choose_attention(name: str, where: Where) -> Choice:
    """The backend that `train.attention` (name) selects.

    Raises:
        UserError: there is no such backend, or it cannot run here.
    """
    try:
        return choose(name, where)
    except ValueError as error:
        raise UserError(f"train.attention cannot be used here: {error}") from error


def choose_flash(name: str, device: torch.device) -> str:
    """Activate the flash kernels that `train.flash` (name) selects, for `varlen` and plain causal attention. Returns
    their name. `auto` takes FlashAttention 3 if it can be used, else torch's own.

    Raises:
        UserError: the kernels that `train.flash` names cannot be used here.
    """
    chosen = ("fa3" if not _unsupported("fa3", device) else OWN) if name == "auto" else name
    if chosen == OWN:
        return OWN
    if unsupported := _unsupported(chosen, device):
        raise UserError(f"train.flash={chosen} cannot be used here: it {unsupported}. Take train.flash=auto.")
    KERNELS.activate_flash_attention_impl(chosen.upper())
    return chosen


def _unsupported(name: str, device: torch.device) -> str:
    """Why kernels of FLASH cannot be used, as the rest of a sentence; empty if they can."""
    module, majors = FLASH[name]
    if device.type != "cuda":
        return f"needs a GPU, not a {device.type} device"
    if (major := torch.cuda.get_device_capability(device)[0]) not in majors:
        return f"is for compute capability {' and '.join(f'{number}.x' for number in majors)}, not {major}.x"
    if name.upper() not in getattr(KERNELS, "list_flash_attention_impls", list)():
        return f"is not known to torch {torch.__version__}"
    with suppress(ModuleNotFoundError):  # of the package that a module is in
        if find_spec(module) is not None:
            return ""
    return f"needs the module {module}, which is not installed"
