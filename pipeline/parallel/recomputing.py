"""Activation checkpointing: what a block's forward pass keeps for the backward pass, and what is computed again."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from pipeline.config.training import TrainConfig

PRODUCTS = ("wq", "wk", "wv", "wo", "w1", "w3", "w2")
"""A block's matrix products in the order of its forward pass, which is how the policy knows them: it is asked
operator by operator, and a name given by hooks would not survive torch.compile."""

PRODUCT_OPERATORS = {torch.ops.aten.mm.default}
if hasattr(torch.ops.mkldnn, "_linear_pointwise"):  # how model.linear asks oneDNN for a product
    PRODUCT_OPERATORS.add(torch.ops.mkldnn._linear_pointwise.default)

ATTENTION = {
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
}
"""The kernels of scaled dot product attention. The unfused one is made of other products and is recomputed."""


def recompute(layers: nn.ModuleList, train: TrainConfig) -> None:
    """Apply `train.activation_checkpointing` to every n-th block (`train.recomputed_blocks`), in place. Results are
    bit-equal with and without."""
    if train.activation_checkpointing == "none":
        return
    extra: dict[str, Any] = {}
    if train.activation_checkpointing == "selective":
        extra["context_fn"] = partial(_contexts, frozenset(train.kept_activations))
    for index, block in enumerate(layers):
        if index % train.recomputed_blocks == 0:
            # Replacing forward on the instance, not wrapping the module, keeps the parameters' published names.
            block.forward = partial(checkpoint, block.forward, use_reentrant=False, preserve_rng_state=False, **extra)


def _contexts(kept: frozenset[str]) -> Any:
    """Contexts of one forward pass and of its recomputation; each counts its own products."""
    return create_selective_checkpoint_contexts(_Policy(kept))


class _Policy:
    """Keeps the results that are named, by the order in which operators come."""

    def __init__(self, kept: frozenset[str]) -> None:
        self.kept = kept
        self.products = {False: 0, True: 0}

    def __call__(self, context: Any, operator: Any, *arguments: Any, **options: Any) -> CheckpointPolicy:
        if operator in ATTENTION:
            return _policy("attention" in self.kept)
        if operator in PRODUCT_OPERATORS:
            number = self.products[context.is_recompute]
            self.products[context.is_recompute] += 1
            return _policy(PRODUCTS[number] in self.kept)
        return CheckpointPolicy.PREFER_RECOMPUTE


def _policy(keep: bool) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE
