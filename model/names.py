"""The names of a Llama's tensors, ours and Hugging Face's, in one table for both directions.

Our names are Meta's. Hugging Face's form also differs in its rotary embedding: ours rotates adjacent pairs of a head's
dimensions, theirs dimension i with i + head_dim/2. So the rows of wq and wk are permuted. Without this, a converted
model writes fluent nonsense.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from drover.model.config import ModelConfig
from drover.model.llama import Llama

EMBEDDING, NORM, OUTPUT = "tok_embeddings.weight", "norm.weight", "output.weight"
"""Parameters outside of layers. A tied output matrix is the embedding."""


class Module(NamedTuple):
    """A module with parameters.

    Attributes:
        theirs: its name in Hugging Face's Llama.
        heads: the setting with the number of heads whose rows the rotary embedding rotates; "one": all heads share
        them.
    """

    theirs: str
    heads: str | None = None


MODULES = {
    "tok_embeddings": Module("model.embed_tokens"),
    "norm": Module("model.norm"),
    "output": Module("lm_head"),
    "attention.wq": Module("self_attn.q_proj", "heads"),
    "attention.wk": Module("self_attn.k_proj", "kv_heads"),
    "attention.wv": Module("self_attn.v_proj"),
    "attention.wo": Module("self_attn.o_proj"),
    "attention.q_norm": Module("self_attn.q_norm", "one"),
    "attention.k_norm": Module("self_attn.k_norm", "one"),
    "feed_forward.w1": Module("mlp.gate_proj"),
    "feed_forward.w2": Module("mlp.down_proj"),
    "feed_forward.w3": Module("mlp.up_proj"),
    "attention_norm": Module("input_layernorm"),
    "ffn_norm": Module("post_attention_layernorm"),
}
"""By our name; for a module of a layer, its name inside the layer."""


def module_of(name: str) -> tuple[str, Module, str]:
    """Their prefix of the layer, the module, and the parameter (weight, bias)."""
    module, _, parameter = name.rpartition(".")
    layer = ""
    if module.startswith("layers."):
        _, number, module = module.split(".", 2)
        layer = f"model.layers.{number}."
    return layer, MODULES[module], parameter


def their_name(name: str) -> str:
    """Hugging Face's name of our parameter."""
    layer, module, parameter = module_of(name)
    return f"{layer}{module.theirs}.{parameter}"


def zero_biases(config: ModelConfig) -> set[str]:
    """Their names of biases that our network does not have. They are written as zeros of shape (dim,), but in a Qwen2,
    which lacks them too, and must be zero when read."""
    return {their_name(f"layers.{layer}.attention.wo.bias") for layer in range(config.layers)} \
        if config.qkv_bias else set()


def rotated_heads(name: str, config: ModelConfig) -> int | None:
    """The number of heads in the parameter's rows, if the rotary embedding rotates them, else None."""
    heads = module_of(name)[1].heads
    return None if heads is None else 1 if heads == "one" else int(getattr(config, heads))


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


def to_huggingface(name: str, tensor: Tensor, config: ModelConfig, *,
                   fourth_bias: bool = True) -> Iterator[tuple[str, Tensor]]:
    """Our parameter in their form: (name, tensor), and a bias of zeros if their class has one with the other three."""
    theirs, heads = their_name(name), rotated_heads(name, config)
    yield theirs, half_rows(tensor, heads) if heads else tensor
    if config.qkv_bias and fourth_bias and name.endswith(".wo.weight"):
        yield f"{theirs.removesuffix('weight')}bias", tensor.new_zeros(config.dim)
