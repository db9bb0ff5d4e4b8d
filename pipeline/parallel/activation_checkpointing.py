"""Activation checkpointing: what a block's forward pass keeps for the backward pass, and what is computed again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import traceback
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from model.attention.layout import PLAIN
from model.llama import Llama
from pipeline.config.training import Activation, TrainConfig

PRODUCT = "product"
"""Under which torch's notes hold a product's name: the last part of the name of the layer that makes it. torch keeps a
note while the layer runs, and with its operators through torch.compile, where what Python sets is not seen."""

# What is in fp8 is `mm` of tensors of torchao's in eager blocks, and in a graph, what these become.
PRODUCT_OPERATORS = {torch.ops.aten.mm.default, torch.ops.aten._scaled_mm.default}
if hasattr(torch.ops.mkldnn, "_linear_pointwise"):  # how model.kernels asks oneDNN for a product
    PRODUCT_OPERATORS.add(torch.ops.mkldnn._linear_pointwise.default)


def checkpoint_activations(model: Llama, train: TrainConfig, always_kept: Sequence[Activation] = ()) -> None:
    """Apply `train.activation_checkpointing` to every n-th block (`train.recomputed_blocks`), in place. Results are
    bit-equal with and without.

    always_kept: results that are kept whatever the configuration says.
    """
    if train.activation_checkpointing == "none":
        return
    extra: dict[str, Any] = {}
    chosen = train.kept_activations if train.activation_checkpointing == "selective" else []
    if chosen or always_kept:
        policy = _Policy(frozenset([*chosen, *always_kept]), model.backend.operators | PLAIN.operators)
        extra["context_fn"] = partial(create_selective_checkpoint_contexts, policy)
    blocks: list[Any] = list(model.layers)  # Any: forward is replaced on the instances
    for layer, block in zip(model.part.layers, blocks, strict=True):
        if layer % train.recomputed_blocks == 0:
            if extra:
                _name_products(block)
            # Replacing forward on the instance, not wrapping the module, keeps the parameters' published names.
            block.forward = partial(checkpoint, block.forward, use_reentrant=False, preserve_rng_state=False, **extra)


def _name_products(block: nn.Module) -> None:
    """Let each linear layer note its name while it runs, whoever calls it and however often."""
    layers: list[tuple[str, Any]] = [(name, layer) for name, layer in block.named_modules()
                                     if isinstance(layer, nn.Linear)]
    for name, layer in layers:
        layer.forward = partial(_named, name.rpartition(".")[2], layer.forward)


def _named(name: str, forward: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    with traceback.annotate({PRODUCT: name}):
        return forward(x)


class _Policy:
    """Keeps the results that are named in `kept`.

    attention: the operators whose results are that of attention.
    """

    def __init__(self, kept: frozenset[str], attention: frozenset[Any]) -> None:
        self.kept, self.attention = kept, attention

    def __call__(self, context: Any, operator: Any, *arguments: Any, **options: Any) -> CheckpointPolicy:
        if operator in self.attention:
            return _policy("attention" in self.kept)
        if operator in PRODUCT_OPERATORS:
            notes = traceback.get_current_meta().get("custom") or {}
            return _policy(notes.get(PRODUCT) in self.kept)
        return CheckpointPolicy.PREFER_RECOMPUTE


def _policy(keep: bool) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE
