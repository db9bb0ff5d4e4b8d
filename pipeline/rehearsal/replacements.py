"""What a rehearsal takes instead of GPUs and of other ranks: the attention of GPUs, kernels that keep as much for the
backward pass, and a process group of any size.

A CPU's operators keep more than a GPU's. On GPUs torch's RMSNorm is one kernel that keeps its input and one number per
token. On CPUs it consists of operators that keep two float32 copies. A compiled block keeps as much as an eager one,
except silu's result, which it recomputes. (A test compares this with torch's partitioner for inductor.) The values of
these kernels are never read.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed import distributed_c10d
from torch.distributed.tensor import DTensor, Partial

from drover.model.attention.backend import Where
from drover.model.attention.choosing import choose, load
from drover.model.attention.varlen import Varlen
from drover.pipeline.core.errors import UserError
from drover.pipeline.parallel.ranks import Ranks


class FlashKernel(Varlen):
    """Varlen's kernels without a GPU. A rehearsal needs only the shapes of their results and of what they keep (output
    and log-sum-exp), which torch knows."""

    name = "varlen"

    def unsupported(self, where: Where) -> str:
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
    missing = _unsupported_there(name, where) if ":" in name else ""
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


def _unsupported_there(name: str, where: Where) -> str:
    """Why a plugin's backend cannot run on this machine; GPUs may run it. Empty if it cannot be loaded, which the
    engine reports."""
    try:
        return load(name).refusal(where)
    except ValueError:
        return ""


class _Kept(torch.autograd.Function):
    """Keeps all its inputs. The result has the shape of the first input, each gradient that of its input."""

    @staticmethod
    def forward(ctx: Any, *given: Tensor) -> Tensor:
        ctx.save_for_backward(*given)
        return torch.zeros_like(given[0])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, ...]:
        return tuple(map(torch.zeros_like, ctx.saved_tensors))


def norm(module: nn.RMSNorm, x: Tensor) -> Tensor:
    """Replaces `nn.RMSNorm.forward`, as one kernel."""
    value = x
    weight: Tensor = module.weight
    if isinstance(x, DTensor) and isinstance(weight, DTensor):
        value, weight = x.to_local(), weight.to_local(grad_placements=[Partial()])
    out: Tensor = _Kept.apply(value, weight, value.new_zeros((*value.shape[:-1], 1), dtype=torch.float32))
    return DTensor.from_local(out, x.device_mesh, x.placements, run_check=False) if isinstance(x, DTensor) else out


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Replaces `drover.model.llama.swiglu`, as in a compiled block."""
    return _Kept.apply(gate, up)


@contextmanager
def fake_world(rank: int, world: int) -> Iterator[Ranks]:
    """This process as rank `rank` of `world`, in a process group that transfers nothing. `Ranks.memory` creates fake
    tensors: shapes, types and sizes of storages, without contents."""
    from torch.testing._internal.distributed.fake_pg import FakeStore  # registers the backend

    assert not dist.is_initialized(), "a rehearsal has a process of its own, or comes before a process group"
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    # Real tensors enter as constants: context parallelism, for example, computes its places with NumPy.
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    send = _held(dist.isend)
    try:
        with mock.patch.object(dist, "isend", send), mock.patch.object(distributed_c10d, "isend", send):
            yield Ranks(rank, world, torch.device("cpu"), memory=lambda: mode)
    finally:
        dist.destroy_process_group()


def _held(send: Any) -> Any:
    """`isend` that keeps the sent tensor alive as long as its work object, as other process groups do."""
    def sent(tensor: Tensor, *others: Any, **named: Any) -> Any:
        work = send(tensor, *others, **named)
        weakref.finalize(work, lambda held: None, tensor)
        return work
    return sent
