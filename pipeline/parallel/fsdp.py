"""How the model is spread over ranks by FSDP2: built on no device, split, then each rank fills in its own part."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from model.attention.backend import Backend
from model.config import ModelConfig
from model.llama import Llama
from pipeline.config.parallel import ParallelConfig
from pipeline.config.training import TrainConfig
from pipeline.parallel.activation_checkpointing import checkpoint_activations
from pipeline.parallel.compiling import compile_blocks, compiles
from pipeline.parallel.grid import Grid, own
from pipeline.parallel.initial_values import InitialValues
from pipeline.parallel.tensor_parallel import apply_tensor_parallel


def parallelize(config: ModelConfig, initial: InitialValues | None, grid: Grid, precision: torch.dtype,
                train: TrainConfig, parallel: ParallelConfig, attention: Backend) -> Llama:
    """A model with its initial weights, split over `grid`.

    initial: None leaves the weights undefined, for a checkpoint to fill in. attention: computes it inside documents.

    Masters and reductions are float32 (float64 for float64); compute is in `precision`. Gradients are summed, not
    averaged: the loss is divided by the global number of targets before.
    """
    with torch.device("meta"):
        model = Llama(config)
    model.backend = attention
    master = torch.float64 if precision == torch.float64 else torch.float32
    model = model.to(master)
    if grid.tensor > 1:
        apply_tensor_parallel(model, grid.mesh["tensor"])
    model.losses.z_loss = train.z_loss
    compiled = compiles(train, grid.ranks.device)
    # NOTE: where attention is computed again inside a graph on a CPU, torch (2.13) stores the random numbers' state at
    # the place of what tensor parallelism stores, and stops. Nothing in it is random: kept, it needs no such state.
    keep_attention = compiled and grid.tensor > 1 and grid.ranks.device.type == "cpu"
    checkpoint_activations(model, train, always_kept=("attention",) if keep_attention else ())
    if compiled:
        compile_blocks(model)
    if not needs_fsdp2(grid, precision):
        return _placed(model, initial, grid)
    # The rotary table reaches the blocks in float32 and must stay so: inputs are not cast.
    policy = MixedPrecisionPolicy(param_dtype=precision, reduce_dtype=master, cast_forward_inputs=False)
    mesh = grid.mesh["replicate", "shard"] if grid.replicate > 1 else grid.mesh["shard"]
    for block in model.layers:
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=parallel.reshard == "always")
    fully_shard(model, mesh=mesh, mp_policy=policy)
    for module in model.modules():
        if isinstance(module, FSDPModule) and grid.data_ranks > 1:  # alone, it would divide by 1 in a pass of its own
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo knows no scaled sum
    blocks: list[Any] = list(model.layers)  # with the methods that fully_shard adds
    for block, following in pairwise(blocks):
        # Each block's weights are asked for one block ahead, whatever Python is doing by then.
        block.set_modules_to_forward_prefetch([following])
        following.set_modules_to_backward_prefetch([block])
    return _placed(model, initial, grid)


def needs_fsdp2(grid: Grid, precision: torch.dtype) -> bool:
    """Whether there is anything to split, to add up or to cast. Where there is not, FSDP2 would only copy every weight
    and gradient several times a step, which takes 3% of it on a CPU, and hold the weights twice."""
    return grid.ranks.world > 1 or precision == torch.bfloat16


def _placed(model: Llama, initial: InitialValues | None, grid: Grid) -> Llama:
    """The model on this rank's device, with its initial weights where they are given."""
    model.to_empty(device=grid.ranks.device)
    if initial is not None:
        fill(model, initial, grid)
    return model


@torch.no_grad()
def fill(model: nn.Module, initial: InitialValues, grid: Grid) -> None:
    """Give each rank its part of every parameter's initial value."""
    for name, parameter in model.named_parameters():
        part = grid.part(parameter)
        own(parameter).copy_(initial(name, parameter.shape, part.offset, part.size))
