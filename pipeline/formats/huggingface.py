"""A Llama's tensors by our names and by others', and the files of a folder in Hugging Face's form.

Besides names, one thing differs: our rotary embedding turns adjacent pairs of a head's dimensions, theirs turns
dimension i with i + head_dim/2. So the rows of wq and wk are permuted. Without that, a converted model speaks fluent
nonsense.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from drover.model.config import ModelConfig
from drover.model.llama import Llama
from drover.pipeline.formats.huggingface_config import config_to_json
from drover.pipeline.formats.tensor_file import Layout, write_tensors


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
"""By our name, within a layer where it is in one. Names in Meta's form are ours."""


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


class Read(Protocol):
    """Reads a rectangle of a parameter by our name; without offset and shape, all of it."""

    def __call__(self, name: str, offset: Sequence[int] | None = None, shape: Sequence[int] | None = None,
                 /) -> Tensor: ...


@dataclass(frozen=True)
class Source:
    """Weights to be written: the network's shape, the element type, and what reads them in that type."""

    config: ModelConfig
    dtype: torch.dtype
    read: Read

    def shards(self, most_bytes: int) -> list[list[str]]:
        """The names of all parameters, in groups of at most so many bytes, or of a single larger one."""
        shards: list[list[str]] = []
        room = 0
        for name, shape in parameter_shapes(self.config).items():
            size = math.prod(shape) * self.dtype.itemsize
            if not shards or size > room:
                shards.append([])
                room = most_bytes
            shards[-1].append(name)
            room -= size
        return shards


@dataclass(frozen=True)
class OutputFile:
    """A file to be written: its name, how many rectangles of parameters it takes, and how to write it to a path."""

    name: str
    rectangles: int
    write: Callable[[Path], object]


def text_file(name: str, text: str) -> OutputFile:
    """A file of text."""
    return OutputFile(name, 0, lambda path: path.write_text(text, encoding="utf-8"))


def to_huggingface(name: str, tensor: Tensor, config: ModelConfig) -> Iterator[tuple[str, Tensor]]:
    """What our parameter is in their form: (name, tensor), and a bias of zeros where they have one."""
    theirs, heads = their_name(name), rotated_heads(name, config)
    yield theirs, half_rows(tensor, heads) if heads else tensor
    if config.qkv_bias and name.endswith(".wo.weight"):
        yield f"{theirs.removesuffix('weight')}bias", tensor.new_zeros(config.dim)


def huggingface_files(source: Source, shard_bytes: int, token_ids: Mapping[str, Any],
                      generation: Mapping[str, Any] | None = None) -> list[OutputFile]:
    """The safetensors files, their index, config.json and generation_config.json.

    Args:
        shard_bytes: of a file at most, but for a tensor that is larger. A tensor is read when its turn to be written
            has come, so that memory is needed for two or three of them.
        token_ids: bos_token_id, eos_token_id and others of that kind, as both configurations name them.
        generation: what else generation_config.json says.
    """
    config, dtype, shards = source.config, source.dtype, source.shards(shard_bytes)
    files, where, size = list[OutputFile](), dict[str, str](), 0
    for number, names in enumerate(shards, 1):
        layouts = _layouts(names, config, dtype)
        files.append(OutputFile(f"model-{number:05d}-of-{len(shards):05d}.safetensors", len(names),
                                _shard_writer(source, names, layouts)))
        where |= dict.fromkeys(layouts, files[-1].name)
        size += sum(layout.size for layout in layouts.values())
    contents = {"model.safetensors.index.json": {"metadata": {"total_size": size}, "weight_map": where},
                "config.json": {**config_to_json(config, dtype), **token_ids},
                "generation_config.json": {**(generation or {}), **token_ids}}
    return [*files, *(text_file(name, json.dumps(content, indent=2) + "\n") for name, content in contents.items())]


def _layouts(names: list[str], config: ModelConfig, dtype: torch.dtype) -> dict[str, Layout]:
    """Name and layout of each tensor of a file, in order."""
    shapes = parameter_shapes(config)
    return {theirs: Layout(dtype, tuple(tensor.shape)) for name in names
            for theirs, tensor in to_huggingface(name, torch.empty(shapes[name], device="meta"), config)}


def _shard_writer(source: Source, names: list[str], layouts: dict[str, Layout]) -> Callable[[Path], object]:
    return lambda path: write_tensors(path, layouts, (
        tensor.detach().to("cpu", source.dtype).contiguous() for name in names
        for _, tensor in to_huggingface(name, source.read(name), source.config)))


def write_folder(folder: Path, files: list[OutputFile]) -> None:
    """Write files into a folder, plainly: who needs it to appear at once, renames it."""
    folder.mkdir(parents=True, exist_ok=True)
    for file in files:
        file.write(folder / file.name)
