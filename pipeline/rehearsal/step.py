"""One optimizer step of the real engine on one rank, with its memory and traffic recorded.

A rehearsal has neither GPUs nor other ranks. It takes a process group of any size that transfers nothing, the attention
of GPUs, and kernels that keep as much for the backward pass. A CPU's operators keep more than a GPU's. On GPUs torch's
RMSNorm is one kernel that keeps its input and one number per token. On CPUs it consists of operators that keep two
float32 copies. A compiled block keeps as much as an eager one, except silu's result, which it recomputes. (A test
compares this with torch's partitioner for inductor.) The values of these kernels are never read.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed import distributed_c10d
from torch.distributed.tensor import DTensor, Partial

import drover.model.llama
import drover.model.loss
from drover.model.attention.backend import Where, choose
from drover.model.attention.varlen import Varlen
from drover.model.config import ModelConfig
from drover.pipeline.config.checks import network
from drover.pipeline.config.phases import BatchPlan, largest_phase, with_largest
from drover.pipeline.config.training import TrainConfig
from drover.pipeline.config.tree import Config, changed
from drover.pipeline.core.errors import UserError
from drover.pipeline.data.sampling.batch import Batch
from drover.pipeline.parallel.grid import Grid, own
from drover.pipeline.parallel.ranks import Ranks
from drover.pipeline.rehearsal.report import Rehearsal, layers_of
from drover.pipeline.rehearsal.watch import Traffic, Watch
from drover.pipeline.training import muon
from drover.pipeline.training.device import DTYPES, choose_precision
from drover.pipeline.training.engine import Engine
from drover.pipeline.training.guards import StepLimits
from drover.pipeline.training.set_up import build_engine


class FlashKernel(Varlen):
    """Varlen's kernels without a GPU. A rehearsal needs only the shapes of their results and of what they keep (output
    and log-sum-exp), which torch knows."""

    name = "varlen"

    def unsupported(self, where: Where) -> str:
        """Nothing: it never computes."""
        return ""


FLASH_KERNEL = f"{FlashKernel.__module__}:{FlashKernel.__name__}"
"""As `train.attention`."""


def on_gpus(name: str, where: Where) -> tuple[str, str]:
    """The backend that replaces `train.attention` in a rehearsal of GPUs (of compute capability 8.0), and a note about
    it.

    Raises:
        UserError: GPUs cannot run it either.
    """
    if ":" in name:  # a plugin's own
        return name, ""
    with mock.patch.object(torch.cuda, "get_device_capability", return_value=(8, 0)):
        try:
            choice = choose(name, replace(where, device=torch.device("cuda")))
        except ValueError as error:
            raise UserError(f"train.attention cannot be used on GPUs: {error}") from error
    chosen, note = choice.backend.name, choice.fallback
    if chosen == "flex":
        note = "flex is rehearsed as varlen: both keep the output and its log-sum-exp"
    return FLASH_KERNEL if chosen in ("varlen", "flex") else chosen, note


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


ENOUGH = 3
"""Micro-batches that are computed of a step without a pipeline: the first, one in the middle, and the last. All in the
middle are equal: the traffic of one is multiplied, and memory has reached its peak by then."""


def rehearse(config: Config, ranks: int, rank: int, *, gpu: bool = True, all_micro_batches: bool = False) -> Rehearsal:
    """Traffic, memory and waits of a step on rank `rank` of `ranks`.

    gpu: as on GPUs, with their attention kernel; else as on CPUs. all_micro_batches: compute every micro-batch.

    Raises:
        UserError: the configuration does not suit so many ranks, or cannot be rehearsed.
    """
    decided, notes, shape = rehearsable(config, ranks, gpu)
    with fake_world(rank, ranks) as world, as_on_gpus(config.train) if gpu else nullcontext():
        result = take_step(decided, shape, world, all_micro_batches)
    result.notes[:0] = notes
    return result


def rehearsable(config: Config, ranks: int, gpu: bool) -> tuple[Config, list[str], ModelConfig]:
    """The configuration as it is rehearsed, notes about it, and the network with its size of vocabulary. Settings that
    cannot be rehearsed are replaced by the nearest that can."""
    notes = []
    if config.train.phases:
        notes.append(f"{largest_phase(config, ranks).name} is rehearsed: its micro-batches have the most tokens")
    config = with_largest(config, ranks)
    train, parallel, model = config.train, config.parallel, config.model
    name, cpu = train.attention, torch.device("cpu")
    precision: str = train.precision
    if precision == "auto":
        precision = "bf16" if gpu else choose_precision("auto", cpu)[0]
    if precision == "fp8":
        precision = "bf16"
        notes.append("fp8 is rehearsed as bf16, which keeps as much for the backward pass")
    if gpu:
        where = Where(cpu, DTYPES[precision], train.compile is not False, model.head_width,
                      parallel.cp > 1)
        name, note = on_gpus(name, where)
        notes += [note] if note else []
    if train.compile or (gpu and train.compile is None):
        notes.append("the loss is rehearsed uncompiled: compiled, logits take less memory")
    return changed(config, {"train.compile": False, "train.precision": precision, "train.attention": name
                            }), notes, network(config)


@contextmanager
def as_on_gpus(train: TrainConfig) -> Iterator[None]:
    """Use the sizes and types of GPUs, and keep as much for the backward pass as blocks do there."""
    activation = swiglu if train.compile is not False else drover.model.llama.swiglu
    with (mock.patch.dict(drover.model.loss.CHUNKS, {"cpu": drover.model.loss.CHUNKS["accelerator"]}),
          mock.patch.dict(muon.COMPUTED_IN, {"cpu": muon.COMPUTED_IN["cuda"]}),
          mock.patch.object(nn.RMSNorm, "forward", norm),
          mock.patch.object(drover.model.llama, "swiglu", activation)):
        yield


def take_step(config: Config, shape: ModelConfig, ranks: Ranks, all_micro_batches: bool = False) -> Rehearsal:
    """A step of the real engine on `ranks`, real or fake. Measurements and rehearsals both use this function.

    config: uncompiled, with a precision other than auto and fp8.
    """
    grid, plan = Grid(ranks, config.parallel), BatchPlan.of(config.train, config.parallel, ranks.world)
    precision = DTYPES[config.train.precision]
    engine = build_engine(config, shape, grid, precision, plan.accumulation, None)
    engine.proven = True  # the check of a start's first step is not part of a step
    every_micro_batch = all_micro_batches or grid.pipeline > 1 or plan.accumulation <= ENOUGH
    count = plan.accumulation if every_micro_batch else ENOUGH
    assert shape.vocab_size is not None
    watch = Watch((shape.vocab_size // grid.tensor, shape.dim))
    sections = [Traffic() for _ in range(count)]
    with ranks.memory(), watch:
        _name_state(engine, watch)
        engine.before_update = lambda: _name_gradients(engine, watch)
        engine.compute(_batches(plan, grid, count, watch, sections), count,
                       torch.tensor(plan.tokens, dtype=torch.float64))
        engine.update(config.train.lr, StepLimits())
        _name_state(engine, watch)
    traffic = Traffic()
    for number, section in enumerate(sections):
        traffic.add(section, plan.accumulation - count + 1 if number == 1 and not every_micro_batch else 1)
    notes = [] if every_micro_batch else [
        f"of {plan.accumulation} micro-batches the first, the second and the last were computed; "
        f"those between count as the second"]
    return Rehearsal(ranks.rank, ranks.world, layers_of(shape, config.parallel, grid.pipeline_rank),
                     watch.memory.peak(), traffic, dict(watch.waits), notes)


def _batches(plan: BatchPlan, grid: Grid, count: int, watch: Watch, sections: list[Traffic]) -> Iterator[Batch]:
    """Micro-batches of sequences with one document each, for which attention needs the most memory."""
    length = plan.sequence_length // grid.context
    for number in range(count):
        watch.traffic = sections[number]
        tokens = torch.zeros(plan.micro_batch, length, dtype=torch.int64)
        documents = torch.zeros_like(tokens, dtype=torch.int32)
        positions = torch.arange(length).expand(plan.micro_batch, length).contiguous()
        yield Batch(tokens, torch.zeros_like(tokens), documents, positions, tokens.numel(),
                    ((plan.sequence_length,),) * plan.micro_batch)


def _name_state(engine: Engine, watch: Watch) -> None:
    """Name weights and optimizer state. The state is created if missing, as training does before its first step."""
    with torch.no_grad():
        for name, parameter in engine.model.named_parameters():
            watch.memory.name(own(parameter.detach()), "weights")
            for state in engine.optimizer.state(name).values():
                watch.memory.name(state, "optimizer state")


def _name_gradients(engine: Engine, watch: Watch) -> None:
    for parameter in engine.model.parameters():
        if parameter.grad is not None:
            watch.memory.name(own(parameter.grad), "gradients")
