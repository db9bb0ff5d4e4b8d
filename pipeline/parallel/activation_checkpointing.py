"""Activation checkpointing: what a block's forward pass keeps for the backward pass, and what is computed again."""

from __future__ import annotations

from collections.abc import Sequence, Set
from contextlib import AbstractContextManager
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import traceback
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from drover.model.attention.module import PLAIN
from drover.model.llama import Llama
from drover.pipeline.config.training import Activation, TrainConfig

PRODUCT = "product"
"""The key of torch's annotations that holds a product's name: the last part of the name of the layer that computes it.
torch keeps an annotation while the layer runs. torch.compile carries it along with the operators, where it would not
see an attribute that Python sets."""

# An fp8 product is `mm` of torchao's tensors in eager blocks, and `_scaled_mm` in a graph.
# With a bias, a product is one `addmm`.
PRODUCT_OPERATORS = {torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten._scaled_mm.default}
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
