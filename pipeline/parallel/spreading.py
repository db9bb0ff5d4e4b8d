"""How the model is spread over ranks by FSDP2: built on no device, split, then each rank fills in its own part."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from model.config import ModelConfig
from model.llama import Llama, initial_value
from pipeline.config.parallel import ParallelConfig
from pipeline.config.training import TrainConfig
from pipeline.parallel.grid import Grid, own
from pipeline.parallel.recomputing import recompute
from pipeline.parallel.tensor import split_products


def spread(config: ModelConfig, seed: int | None, grid: Grid, precision: torch.dtype, train: TrainConfig,
           parallel: ParallelConfig) -> Llama:
    """A model with its initial weights, split over `grid`.

    seed: None leaves the weights undefined, for a checkpoint to fill in.

    Masters and reductions are float32 (float64 for float64); compute is in `precision`. Gradients are summed, not
    averaged: the loss is divided by the global number of targets before. The weights depend on `seed` alone.
    """
    with torch.device("meta"):
        model = Llama(config)
    master = torch.float64 if precision == torch.float64 else torch.float32
    model = model.to(master)
    if grid.tensor > 1:
        split_products(model, grid.mesh["tensor"])
    recompute(model.layers, train)
    if compiles(train, grid.ranks.device):
        compile_blocks(model)
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
    model.to_empty(device=grid.ranks.device)
    if seed is not None:
        fill(model, config, seed, grid)
    return model


@torch.no_grad()
def fill(model: nn.Module, config: ModelConfig, seed: int, grid: Grid) -> None:
    """Give each rank its part of every parameter's initial value; only the rows that it needs are drawn."""
    for name, parameter in model.named_parameters():
        part = grid.part(parameter)
        own(parameter).copy_(initial_part(name, parameter.shape, config, seed, part.offset, part.size))


def initial_part(name: str, shape: Sequence[int], config: ModelConfig, seed: int, offset: Sequence[int],
                 size: Sequence[int]) -> Tensor:
    """A rectangle of a parameter's initial value."""
    value = initial_value(name, shape, config, seed, range(offset[0], offset[0] + size[0]))
    for dimension in range(1, value.dim()):
        value = value.narrow(dimension, offset[dimension], size[dimension])
    return value


def compiles(train: TrainConfig, device: torch.device) -> bool:
    """Whether blocks are compiled: as configured, or on GPUs."""
    return device.type == "cuda" if train.compile is None else train.compile


def compile_blocks(model: Llama) -> None:
    """Compile each block's computation; what FSDP2 does around a block stays outside."""
    for block in model.layers:
        block.forward = torch.compile(block.forward)
