"""What every rank of the matrix does for a case: optimizer steps on made-up packed data, and what came of them."""

import contextlib
import dataclasses
from datetime import timedelta
from functools import partial
from unittest import mock

import numpy as np
import torch
import torch._dynamo  # here, not at first use: one process imports for all ranks
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage

from drover.model.config import ModelConfig
from drover.pipeline.config.phases import PhasePlan
from drover.pipeline.config.training import ParallelConfig, TrainConfig
from drover.pipeline.config.tree import Config
from drover.pipeline.core.errors import UserError
from drover.pipeline.data.sampling.batch import pack
from drover.pipeline.parallel import reducing_stage
from drover.pipeline.parallel.context_parallel import part_of
from drover.pipeline.parallel.fsdp import drawn
from drover.pipeline.parallel.grid import Grid
from drover.pipeline.training.device import DTYPES
from drover.pipeline.training.guards import StepLimits
from drover.pipeline.training.optimizers import planned_rate
from drover.pipeline.training.set_up import build_engine
from tests.model.agreement import operators
from tests.model.varlen_on_cpu import CALLS as KERNEL_CALLS
from tests.model.varlen_on_cpu import NAME

SEQUENCES, LENGTH = 8, 48
LR = 5e-4
MODEL = ModelConfig(dim=64, layers=3, heads=4, kv_heads=2, vocab_size=384, context_length=64)


def model_of(tied=False, shape=None):
    """MODEL with tied embeddings or not, and with other fields than its own."""
    return MODEL.model_copy(update={"tied_embeddings": tied, **(shape or {})})


def windows(step):
    """The step's windows, with 0 to 5 document starts each: the targets fall unevenly over ranks."""
    random = np.random.default_rng(step)
    return [(random.integers(0, 384, LENGTH + 1), np.sort(random.choice(LENGTH + 1, count, replace=False)))
            for count in random.integers(0, 6, SEQUENCES)]


def nothing(*given):
    """What `train_steps` calls where nobody looks."""


def train_steps(ranks, precision="fp64", steps=12, first=0, accumulation=1, tied=False, shape=None, backend=None,
                severed=None, train=None, parallel=None, built=nothing, before=nothing, update=nothing, after=nothing):
    """Train on these ranks. All ranks call this alike.

    first: the step to begin with. accumulation: micro-batches of a rank in a step. tied, shape: of the model, see
    `model_of`. backend: of torch.compile; None: blocks are not compiled. severed: a module whose output is cut off from
    the graph of gradients, as a fault would. built: called with the engine before the first step. before, update,
    after: called with the engine and the step's number before a step, before its weights change, and after it; after
    also with the step's result.

    Returns, on rank 0: `results`, (steps, 2) loss and gradient norm; `gradients`, of the first and the last step,
    whole, by parameter.
    """
    torch._dynamo.reset()  # nothing of the case before
    model = model_of(tied, shape)
    parallel = ParallelConfig(**parallel or {})
    grid = Grid(ranks, parallel)
    share = SEQUENCES // grid.data_ranks
    config = Config(model=model, parallel=parallel,
                    train=TrainConfig(**{
                        "precision": precision, "micro_batch": share // accumulation, "steps": steps, "lr": LR,
                        "warmup_steps": steps // 5, "compile": backend is not None, **(train or {})}))
    with mock.patch.object(torch, "compile", partial(torch.compile, backend=backend or "inductor")):
        engine = build_engine(config, model, grid, DTYPES[precision], accumulation, drawn(model, 0))
    if severed:
        engine.model.get_submodule(severed).register_forward_hook(lambda module, inputs, output: output.detach())
    built(engine)
    results, gradients = [], []

    def take(step):
        if step in (first, steps - 1):
            gradients.append(whole(ranks, engine.gradients()))
        update(engine, step)

    for step in range(first, steps):
        every = windows(step)
        batch = pack(every[grid.data_rank * share:(grid.data_rank + 1) * share])
        if grid.context > 1:
            batch = part_of(batch, grid.context, grid.context_rank, config.train.across_documents)
        before(engine, step)
        engine.before_update = partial(take, step)
        result = engine.step(batch.split(config.train.micro_batch), accumulation, pack(every).targets,
                             planned_rate(step, PhasePlan.of(config.train)), StepLimits())
        results.append([result.loss, result.grad_norm])
        after(engine, step, result)
    return {"results": results, "gradients": gradients}


@contextlib.contextmanager
def called(*names):
    """(name, group) of each call of those of torch's collectives; names that this torch does not have are left out."""
    result = []

    def noting(name, collective):
        def call(*given, **named):
            result.append((name, named.get("group")))
            return collective(*given, **named)
        return call

    known = {name: noting(name, getattr(dist, name)) for name in names if hasattr(dist, name)}
    with mock.patch.multiple(dist, **known):
        yield result


GATHERS, REDUCTIONS = (("all_gather_single", "all_gather_into_tensor"),  # as torch 2.13 and 2.11
                       ("reduce_scatter_single", "reduce_scatter_tensor"))


def blocks(module):
    """(name, block) of each block in a module."""
    return [(name, inner) for name, inner in module.named_modules() if name.rpartition(".")[0] == "layers"]


def passes(ranks, **settings):
    """Passes without a backward pass between optimizer steps: what they gave after each step, on rank 0.

    `losses` of every target, `logits`, and those of the last token alone, of what rank 0 trains on."""
    result = []

    def after(engine, *_):
        batch = pack(windows(0)[:2])
        extra = {"documents": batch.documents, "positions": batch.positions}
        with torch.no_grad():
            losses = engine.model(batch.tokens, batch.labels, **extra, reduction="none")
            logits, last = engine.model(batch.tokens, **extra), engine.model(batch.tokens, last_only=True)
        engine.free_unsharded()
        result.append({"losses": losses.numpy(), "logits": logits.numpy(), "last": last[:, -1:].numpy()})

    return {"results": train_steps(ranks, **settings, after=after)["results"], "passes": result}


def traffic(ranks, **settings):
    """How often this rank gathered weights and reduced gradients in `train_steps`; and how often it had gathered when
    a module first began its forward pass, or a block its backward pass."""
    seen = {"forward": {}, "backward": {}}
    with called(*GATHERS) as gathers, called(*REDUCTIONS) as reductions:
        def note(direction, name, *given):
            seen[direction].setdefault(name, len(gathers))

        def built(engine):
            held = blocks(engine.model)
            for name, module in [*held, *((name, engine.model.get_submodule(name))
                                          for name in ("tok_embeddings", "output"))]:
                module.register_forward_pre_hook(partial(note, "forward", name))
            for name, module in held:
                module.register_full_backward_pre_hook(partial(note, "backward", name))

        train_steps(ranks, **settings, built=built)
    return {"gathers": len(gathers), "reductions": len(reductions),
            **{direction: list(first.items()) for direction, first in seen.items()}}


def reduced_early(ranks, torchs=False, **settings):
    """A pipeline's first step with our stage, or with torch's: `begun`, how many reductions of gradients this rank had
    begun when each of its blocks began its last backward pass, in the order of these; what `train_steps` returns."""
    last = {}

    def built(engine):
        for stage in engine.model.stages:
            for block, module in blocks(stage):
                module.register_full_backward_pre_hook(partial(note, block))

    def note(block, *given):
        last.pop(block, None)
        last[block] = len(reductions)

    stage = PipelineStage if torchs else reducing_stage.ReducingStage
    with called(*REDUCTIONS) as reductions, mock.patch.object(reducing_stage, "ReducingStage", stage):
        done = train_steps(ranks, steps=1, **settings, built=built)
    return {**done, "begun": list(last.values()), "blocks": list(last)}


def exchanges(ranks, train=None, **settings):
    """How many matrix products run between each exchange of activations and the wait for it, in a step with varlen's
    kernel for the CPU: `gathers`, `sums` of gradients; and how often `attention` was computed forward."""
    before, result, begun = KERNEL_CALLS["forward"], {"gathers": [], "sums": []}, None
    for name in operators(partial(train_steps, ranks, steps=1, train={"attention": NAME, **(train or {})}, **settings)):
        if "all_gather_into_tensor" in name or "reduce_scatter_tensor" in name:
            begun = result["gathers" if "all_gather" in name else "sums"]
            begun.append(0)
        elif "wait_tensor" in name:
            begun = None
        elif begun is not None and "aten::mm" in name:
            begun[-1] += 1
    return {**result, "attention": KERNEL_CALLS["forward"] - before}


def waits(ranks, seconds, parallel):
    """The names of the mesh's groups and how many seconds they wait."""
    mesh = Grid(dataclasses.replace(ranks, patience=timedelta(seconds=seconds)), ParallelConfig(**parallel)).mesh
    groups = {axis: mesh.get_group(axis) for axis in mesh.mesh_dim_names}
    return {axis: (group.group_desc, group._get_backend(ranks.device).options._timeout.total_seconds())
            for axis, group in groups.items()}


def weights(ranks, engine):
    """Whole weights in float64, by their names in a checkpoint, on rank 0."""
    return whole(ranks, {name: shards for name, shards in engine.state_shards().items() if name.startswith("model.")})


def whole(ranks, mine):
    """Whole tensors in float64 of the pieces that all ranks hold, by name, on rank 0; NaN where nobody holds one."""
    copied = {name: [(piece.offset, piece.shape, piece.tensor.detach().double().numpy()) for piece in pieces]
              for name, pieces in mine.items()}
    result = {}
    for name, pieces in ((name, pieces) for part in ranks.collect(copied) for name, pieces in part.items()):
        for offset, shape, tensor in pieces:
            place = result.setdefault(name, np.full(shape, np.nan))
            place[tuple(slice(a, a + n) for a, n in zip(offset, tensor.shape, strict=True))] = tensor
    return dict(sorted(result.items()))


def one_refuses(ranks):
    """Returns, on rank 0, the error of every rank where the last one cannot do its part."""
    def part():
        if ranks.rank == ranks.world - 1:
            raise UserError("tensor x has values that are NaN")
    try:
        result = ranks.by_all(part)
    except UserError as error:
        result = str(error)
    return ranks.collect(result)
