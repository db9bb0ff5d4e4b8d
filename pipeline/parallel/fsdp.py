"""FSDP2: the model is built on the meta device and sharded, then each rank fills in its own part."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from drover.model.attention.backend import Backend
from drover.model.config import ModelConfig
from drover.model.llama import Llama, ModelPart, initial_value
from drover.pipeline.config.training import ParallelConfig, TrainConfig
from drover.pipeline.parallel.blocks import checkpoint_activations, compile_blocks, compiles
from drover.pipeline.parallel.fp8 import convert_to_fp8
from drover.pipeline.parallel.grid import Grid, own
from drover.pipeline.parallel.pipeline_parallel import PipelineStage
from drover.pipeline.parallel.tensor_parallel import apply_tensor_parallel

InitialValues = Callable[[str, Sequence[int], Sequence[int], Sequence[int]], Tensor]
"""(name of a parameter, its shape, offset, size) -> that rectangle of its initial value, on the host."""


def drawn(config: ModelConfig, seed: int) -> InitialValues:
    """`drover.model.llama.initial_value`. Each rank draws only the rows that it needs, and all layouts get the same
    values.

    It uses as many threads as torch has on this rank (OMP_NUM_THREADS, which launches set to the rank's share of the
    cores).
    """
    workers = torch.get_num_threads()

    def values(name: str, shape: Sequence[int], offset: Sequence[int], size: Sequence[int]) -> Tensor:
        value = initial_value(name, shape, config, seed, range(offset[0], offset[0] + size[0]), workers)
        for dimension in range(1, value.dim()):
            value = value.narrow(dimension, offset[dimension], size[dimension])
        return value
    return values


EXCHANGE_DURING_PRODUCTS = {"reorder_for_compute_comm_overlap": True,
                            "reorder_for_compute_comm_overlap_passes": ["raise_comms", "sink_waits"]}
"""Options of torch.compile for blocks that exchange activations: inductor starts collectives as early, and waits for
them as late, as the graph allows. In the backward pass it computes gradients of weights meanwhile. Without these
options it waits at once."""


def parallelize(config: ModelConfig, initial: InitialValues | None, grid: Grid, precision: torch.dtype,
                train: TrainConfig, parallel: ParallelConfig, attention: Backend,
                part: ModelPart | None = None) -> Llama:
    """A model with its initial weights, sharded over `grid`.

    initial: None leaves the weights undefined, for a checkpoint to fill in. attention: the backend inside documents.
    part: builds only these layers of a pipeline, as a `PipelineStage`.

    Master weights and reductions are float32 (float64 for float64). The model computes in `precision`. Gradients are
    summed, not averaged, because the loss is already divided by the global number of targets.
    """
    with torch.device("meta"):
        model = Llama(config) if part is None else PipelineStage(config, part)
    model.backend = attention
    master = torch.float64 if precision == torch.float64 else torch.float32
    model = model.to(master)
    if train.precision == "fp8":
        convert_to_fp8(model, train, grid.ranks.device, grid.tensor)
    if grid.tensor > 1:
        apply_tensor_parallel(model, grid.mesh["tensor"])
    model.losses.z_loss = train.z_loss
    compiled = compiles(train, grid.ranks.device)
    # NOTE: if a graph on a CPU computes attention again, torch (2.13) saves the state of random numbers in the place of
    # a tensor of tensor parallelism, and fails. Kept, attention needs no such state (nothing in it is random).
    keep_attention = compiled and grid.tensor > 1 and grid.ranks.device.type == "cpu"
    checkpoint_activations(model, train, ("attention",) if keep_attention else (), grid.tensor)
    options = EXCHANGE_DURING_PRODUCTS if grid.tensor * grid.context > 1 else None
    if compiled:
        compile_blocks(model, train, options)
    if needs_fsdp2(grid, precision):
        shard_units(model, grid, precision, master, parallel.reshard == "always")
    return placed(model, initial, grid)


def shard_units(model: Llama, grid: Grid, precision: torch.dtype, master: torch.dtype, again: bool) -> None:
    """Shard `model` by FSDP2 in units: the embedding, each block, and the last norm with the output matrix. The weights
    of a unit are all-gathered together, just ahead of their use, and its gradients reduced together. A tied embedding
    and the norm belong to the root, which holds them for the whole step.

    again: whether weights are resharded after the forward pass, and all-gathered again for the backward pass.
    """
    # The rotary table reaches the blocks in float32 and must stay so: inputs are not cast.
    policy = MixedPrecisionPolicy(param_dtype=precision, reduce_dtype=master, cast_forward_inputs=False)
    mesh = grid.weights_mesh
    alone = mesh.size() == 1  # it would divide by 1 in a pass of its own
    shard = partial(fully_shard, mesh=mesh, mp_policy=policy)
    units: list[Any] = [shard(block, reshard_after_forward=again) for block in model.layers]
    if model.part.embeds and not model.config.tied_embeddings:
        embedding: Any = shard(model.tok_embeddings, reshard_after_forward=again)
        embedding.set_unshard_in_backward(False)  # its gradient needs token ids, not weights
        units = [embedding, *units]
        # Under tensor parallelism its output is a view, which no code overwrites.
        warnings.filterwarnings("ignore", message=r"FSDP2-wrapped module \(FSDPEmbedding\) returned a view")
    if model.part.predicts and not model.config.tied_embeddings:
        # The backward pass begins with these: resharded, they would be all-gathered again at once.
        shard([model.norm, model.output], reshard_after_forward=not model.training)
        units = [*units, model.output]
    root: Any = shard(model, reshard_after_forward=None if model.training else True)
    for module in model.modules():
        if isinstance(module, FSDPModule) and not alone:
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo has no scaled sum
    # Prefetch each unit's weights one unit ahead.
    for unit, following in pairwise([root, *units]):
        unit.set_modules_to_forward_prefetch([following])
    # The first unit names the root, which has nothing left to prefetch. Without a name, FSDP2 would prefetch what ran
    # before: from the second micro-batch on, the head of the previous micro-batch.
    for unit, following in pairwise([root, *reversed(units), root]):
        unit.set_modules_to_backward_prefetch([following])


def needs_fsdp2(grid: Grid, precision: torch.dtype) -> bool:
    """Whether there is anything to shard, to reduce or to cast. If not, FSDP2 would only hold the weights twice, and
    copy every weight and gradient several times a step: 3% of its time on a CPU."""
    return grid.ranks.world > 1 or precision == torch.bfloat16


def placed(model: Llama, initial: InitialValues | None, grid: Grid) -> Llama:
    """The model on this rank's device, with its initial weights if given."""
    with grid.ranks.memory():
        model.to_empty(device=grid.ranks.device)
    if initial is not None:
        grid.ranks.by_all(lambda: fill(model, initial, grid))
    return model


@torch.no_grad()
def fill(model: nn.Module, initial: InitialValues, grid: Grid) -> None:
    """Fill in this rank's part of every parameter's initial value."""
    for name, parameter in model.named_parameters():
        part = grid.part(parameter)
        own(parameter).copy_(initial(name, parameter.shape, part.offset, part.size))
