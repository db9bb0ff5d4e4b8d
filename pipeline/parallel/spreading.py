"""How the model is spread over ranks: built on no device, sharded, then each rank fills in its own part."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from model.config import ModelConfig
from model.llama import Llama, initial_value

KEPT_OPERATORS = {
    torch.ops.aten.mm.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
}
"""What selective activation checkpointing keeps: matrix products and attention; the rest is cheap to redo."""


def spread(config: ModelConfig, seed: int | None, mesh: DeviceMesh, precision: torch.dtype,
           checkpointing: str) -> Llama:
    """A model with its initial weights, sharded over `mesh` by FSDP2, block by block.

    seed: None leaves the weights undefined, for a checkpoint to fill in.

    Masters and reductions are float32 (float64 for float64); compute is in `precision`. Gradients are summed, not
    averaged: the loss is divided by the global number of targets before. The weights depend on `seed` alone.
    """
    with torch.device("meta"):
        model = Llama(config)
    master = torch.float64 if precision == torch.float64 else torch.float32
    model = model.to(master)
    for block in model.layers:
        assert isinstance(block, nn.Module)
        checkpoint_activations(block, checkpointing)
    # The rotary table reaches the blocks in float32 and must stay so: inputs are not cast.
    policy = MixedPrecisionPolicy(param_dtype=precision, reduce_dtype=master, cast_forward_inputs=False)
    group = mesh if mesh["replicate"].size() > 1 else mesh["shard"]
    for block in model.layers:
        fully_shard(block, mesh=group, mp_policy=policy)
    fully_shard(model, mesh=group, mp_policy=policy)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo knows no scaled sum
    model.to_empty(device=mesh.device_type)  # "cuda" is this rank's own, set when the ranks started
    if seed is not None:
        fill(model, config, seed)
    return model


@torch.no_grad()
def fill(model: nn.Module, config: ModelConfig, seed: int) -> None:
    """Give each rank its part of every parameter's initial value; one whole parameter at a time is in memory."""
    for name, parameter in model.named_parameters():
        value = initial_value(name, parameter.shape, config, seed).to(parameter.dtype)
        if isinstance(parameter, DTensor):
            parameter.copy_(distribute_tensor(value.to(parameter.device), parameter.device_mesh, parameter.placements,
                                              src_data_rank=None))
        else:
            parameter.copy_(value)


def checkpoint_activations(block: nn.Module, kind: str) -> None:
    """Make a block recompute activations in the backward pass: `none`, `full` or `selective`. Bit-equal results."""
    if kind == "none":
        return
    extra: dict[str, Any] = {}
    if kind == "selective":
        extra["context_fn"] = partial(create_selective_checkpoint_contexts, _keep)
    # Replacing forward on the instance, not wrapping the module, keeps the parameters' published names.
    block.forward = partial(checkpoint, block.forward, use_reentrant=False, preserve_rng_state=False, **extra)


def _keep(context: Any, operator: Any, *arguments: Any, **options: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operator in KEPT_OPERATORS else CheckpointPolicy.PREFER_RECOMPUTE
