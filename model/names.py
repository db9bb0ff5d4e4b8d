"""The names of a Llama's tensors, ours and Hugging Face's, in one table for both directions.

Our names are Meta's. Hugging Face's form also differs in its rotary embedding: ours rotates adjacent pairs of a head's
dimensions, theirs dimension i with i + head_dim/2. So the rows of wq and wk are permuted. Without this, a converted
model writes fluent nonsense.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

import torch
from torch import Tensor

from drover.model.config import ModelConfig
from drover.model.llama import Llama

EMBEDDING, NORM, OUTPUT = "tok_embeddings.weight", "norm.weight", "output.weight"
"""Parameters outside of layers. A tied output matrix is the embedding."""


MODULES = {
    "tok_embeddings": "model.embed_tokens",
    "norm": "model.norm",
    "output": "lm_head",
    "attention.wq": "self_attn.q_proj",
    "attention.wk": "self_attn.k_proj",
    "attention.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w2": "mlp.down_proj",
    "feed_forward.w3": "mlp.up_proj",
    "attention_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
"""Hugging Face's names by ours; for a module of a layer, its name inside the layer."""


def their_name(name: str) -> str:
    """Hugging Face's name of our parameter."""
    module = name.removesuffix(".weight")
    if not module.startswith("layers."):
        return f"{MODULES[module]}.weight"
    _, number, module = module.split(".", 2)
    return f"model.layers.{number}.{MODULES[module]}.weight"


def rotated_heads(name: str, config: ModelConfig) -> int | None:
    """The number of heads in the parameter's rows, if the rotary embedding rotates them, else None."""
    return {"wq": config.heads, "wk": config.kv_heads}.get(name.split(".")[-2])


def half_rows(weight: Tensor, heads: int) -> Tensor:
    """Rows of each head from adjacent pairs (0, 1, 2, 3 ...) to halves (0, 2, 4 ... 1, 3, 5 ...)."""
    return weight.reshape(heads, -1, 2, *weight.shape[1:]).transpose(1, 2).reshape(weight.shape)


def pair_rows(weight: Tensor, heads: int) -> Tensor:
    """The inverse of `half_rows`."""
    return weight.reshape(heads, 2, -1, *weight.shape[1:]).transpose(1, 2).reshape(weight.shape)


@lru_cache(maxsize=8)  # called for each layer of a model
def parameter_shapes(config: ModelConfig) -> Mapping[str, tuple[int, ...]]:
    """Shapes of all parameters by our names; a tied matrix once."""
    with torch.device("meta"):
        return {name: tuple(parameter.shape) for name, parameter in Llama(config).named_parameters()}


def to_huggingface(name: str, tensor: Tensor, config: ModelConfig) -> list[tuple[str, Tensor]]:
    """Our parameter in their form: one (name, tensor)."""
    heads = rotated_heads(name, config)
    return [(their_name(name), half_rows(tensor, heads) if heads else tensor)]
