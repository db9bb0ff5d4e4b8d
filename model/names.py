"""A Llama's tensors by our names and by others': one table, both ways.

Names in Meta's form are ours. In Hugging Face's, one thing more differs: our rotary embedding turns adjacent pairs of a
head's dimensions, theirs turns dimension i with i + head_dim/2. So the rows of wq and wk are permuted. Without that, a
converted model speaks fluent nonsense.
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
"""What is in no layer; a tied output matrix is the embedding."""


class Module(NamedTuple):
    """A module with parameters.

    Attributes:
        theirs: its name in Hugging Face's Llama.
        heads: the setting that counts the heads whose rows the rotary embedding turns; "one": all heads share them.
        axis: along which Meta cuts its matrix into parts; None: each part has all of it.
    """

    theirs: str
    heads: str | None = None
    axis: int | None = 0


MODULES = {
    "tok_embeddings": Module("model.embed_tokens"),
    "norm": Module("model.norm", axis=None),
    "output": Module("lm_head"),
    "attention.wq": Module("self_attn.q_proj", "heads"),
    "attention.wk": Module("self_attn.k_proj", "kv_heads"),
    "attention.wv": Module("self_attn.v_proj"),
    "attention.wo": Module("self_attn.o_proj", axis=1),
    "attention.q_norm": Module("self_attn.q_norm", "one", None),
    "attention.k_norm": Module("self_attn.k_norm", "one", None),
    "feed_forward.w1": Module("mlp.gate_proj"),
    "feed_forward.w2": Module("mlp.down_proj", axis=1),
    "feed_forward.w3": Module("mlp.up_proj"),
    "attention_norm": Module("input_layernorm", axis=None),
    "ffn_norm": Module("post_attention_layernorm", axis=None),
}
"""By our name, within a layer where it is in one."""


def module_of(name: str) -> tuple[str, Module, str]:
    """Their prefix of the layer, the module, and which of its parameters this is (weight, bias)."""
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
    """Their names of biases that our network has not: written as zeros of shape (dim,), and read only if they are."""
    return {their_name(f"layers.{layer}.attention.wo.bias") for layer in range(config.layers)} \
        if config.qkv_bias else set()


def rotated_heads(name: str, config: ModelConfig) -> int | None:
    """How many heads' rows the parameter holds if the rotary embedding acts on them, else None."""
    heads = module_of(name)[1].heads
    return None if heads is None else 1 if heads == "one" else int(getattr(config, heads))


def half_rows(weight: Tensor, heads: int) -> Tensor:
    """Rows of each head from adjacent pairs (0, 1, 2, 3 ...) to halves (0, 2, 4 ... 1, 3, 5 ...)."""
    return weight.reshape(heads, -1, 2, *weight.shape[1:]).transpose(1, 2).reshape(weight.shape)


def pair_rows(weight: Tensor, heads: int) -> Tensor:
    """The inverse of `half_rows`."""
    return weight.reshape(heads, 2, -1, *weight.shape[1:]).transpose(1, 2).reshape(weight.shape)


@lru_cache(maxsize=8)  # asked for each layer of a model
def parameter_shapes(config: ModelConfig) -> Mapping[str, tuple[int, ...]]:
    """Shapes of all parameters under our names, a tied matrix once."""
    with torch.device("meta"):
        return {name: tuple(parameter.shape) for name, parameter in Llama(config).named_parameters()}


def to_huggingface(name: str, tensor: Tensor, config: ModelConfig) -> Iterator[tuple[str, Tensor]]:
    """What our parameter is in their form: (name, tensor), and a bias of zeros where they have one."""
    theirs, heads = their_name(name), rotated_heads(name, config)
    yield theirs, half_rows(tensor, heads) if heads else tensor
    if config.qkv_bias and name.endswith(".wo.weight"):
        yield f"{theirs.removesuffix('weight')}bias", tensor.new_zeros(config.dim)
