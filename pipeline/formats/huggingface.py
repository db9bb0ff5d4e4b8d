"""Weights in the shape of Hugging Face's LlamaForCausalLM, both ways; its config is huggingface_config.py.

Besides names, one thing differs: our rotary embedding turns adjacent pairs of a head's dimensions, theirs
turns dimension i with i + head_dim/2. So the rows of wq and wk are permuted. Without that, a converted model
speaks fluent nonsense.
"""

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from model.config import ModelConfig
from model.llama import Llama
from pipeline.config.shapes import read_shape
from pipeline.formats.huggingface_config import config_to_json
from pipeline.formats.tensor_file import Layout, write_tensors

_OUTER_NAMES = {
    "tok_embeddings.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_BLOCK_NAMES = {
    "attention.wq.weight": "self_attn.q_proj.weight",
    "attention.wk.weight": "self_attn.k_proj.weight",
    "attention.wv.weight": "self_attn.v_proj.weight",
    "attention.wo.weight": "self_attn.o_proj.weight",
    "feed_forward.w1.weight": "mlp.gate_proj.weight",
    "feed_forward.w2.weight": "mlp.down_proj.weight",
    "feed_forward.w3.weight": "mlp.up_proj.weight",
    "attention_norm.weight": "input_layernorm.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
}
_NORM_NAMES = {"attention.q_norm.weight": "self_attn.q_norm.weight",
               "attention.k_norm.weight": "self_attn.k_norm.weight"}
"""As in Qwen3, of models with qk_norm."""
_BIAS_NAMES = {f"attention.w{letter}.bias": f"self_attn.{letter}_proj.bias" for letter in "qkv"}
"""Our and their names of the biases of models with qkv_bias."""
_FOURTH_BIAS = "self_attn.o_proj.bias"
"""Their classes have this bias too, and our network has not: it is written as zeros, and read only if it is zero."""


def to_huggingface(state: Iterable[tuple[str, Tensor]], config: ModelConfig) -> Iterator[tuple[str, Tensor]]:
    """Our (name, tensor) pairs as theirs, one at a time; a tied output matrix is left out, as they do.

    Raises ValueError for a name that is not a Llama's.
    """
    names = their_names(config)
    for name, tensor in state:
        if name not in names:
            raise ValueError(f"There is no parameter {name!r} in a Llama of {config.layers} layers.")
        if name == "output.weight" and config.tied_embeddings:
            continue
        heads = rotated_heads(name, config)
        yield names[name], half_rows(tensor, heads) if heads else tensor
        for theirs in _fourth_bias(name, config):
            yield theirs, tensor.new_zeros(config.dim)


def from_huggingface(
    state: Iterable[tuple[str, Tensor]], config: ModelConfig
) -> Iterator[tuple[str, Tensor]]:
    """Their (name, tensor) pairs as ours; a tied embedding is also given as the output matrix.

    Raises ValueError for a name that is not a Llama's, and for rows that are not the config's heads. The rotary
    frequencies that old files hold are skipped: the config says the same.
    """
    names = {theirs: ours for ours, theirs in their_names(config).items()}
    zeros = zero_biases(config)
    for name, tensor in state:
        if name.endswith("rotary_emb.inv_freq") or (name == "lm_head.weight" and config.tied_embeddings):
            continue
        if name in zeros:
            if tensor.shape != (config.dim,) or tensor.any():
                raise ValueError(f"{name} is not {config.dim} zeros: that network computes something else.")
            continue
        if name not in names:
            raise ValueError(f"There is no parameter {name!r} in a Llama of {config.layers} layers.")
        heads = rotated_heads(names[name], config)
        if heads and (not tensor.dim() or tensor.shape[0] % (2 * heads)):
            raise ValueError(f"{name} is {tuple(tensor.shape)}, whose rows are not {heads} heads of pairs.")
        yield names[name], pair_rows(tensor, heads) if heads else tensor
        if names[name] == "tok_embeddings.weight" and config.tied_embeddings:
            yield "output.weight", tensor


def stream_folder(
    path: Path,
    shapes: Mapping[str, tuple[int, ...]],
    read: Callable[[str], Tensor],
    config: ModelConfig,
    *,
    dtype: torch.dtype,
    bos_id: int | None,
    eos_id: int | list[int] | None,
    generation: Mapping[str, Any] | None = None,
    max_shard_bytes: int = 5_000_000_000,
) -> None:
    """Write config.json, generation_config.json, safetensors shards and their index into the folder `path`.

    generation: what generation_config.json says beyond BOS and EOS; a padding id stands in config.json too.

    shapes: of all weights, by our names. `read` gives one by name; each is asked for once, when its turn to be
    written has come, so that memory is needed for two or three tensors, not for a shard or the model. A shard holds
    at most max_shard_bytes, except for a single tensor that is larger. The files are written plainly: who needs the
    folder to appear at once, renames it. Raises ValueError if the weights do not fit the config.
    """
    _check_fit(shapes, parameter_shapes(config), config)
    path.mkdir(parents=True, exist_ok=True)
    files = shard_files(config, dtype, max_shard_bytes)
    for file, names in files.items():
        write_shard(path / file, names, read, config, dtype)
    ids = {"bos_token_id": bos_id, "eos_token_id": eos_id}
    if generation is not None and "pad_token_id" in generation:
        ids["pad_token_id"] = generation["pad_token_id"]
    for name, content in descriptions(files, config, dtype, ids, generation).items():
        (path / name).write_text(content, encoding="utf-8")


def shard_files(config: ModelConfig, dtype: torch.dtype, max_shard_bytes: int) -> dict[str, list[str]]:
    """Which of our parameters go into which file: by the file's name, in the order of writing."""
    shards = _split(parameter_shapes(config), dtype.itemsize, max_shard_bytes)
    return {f"model-{number:05d}-of-{len(shards):05d}.safetensors": names for number, names in enumerate(shards, 1)}


def write_shard(path: Path, names: list[str], read: Callable[[str], Tensor], config: ModelConfig,
                dtype: torch.dtype) -> None:
    """Write one file of `shard_files`, tensor by tensor."""
    theirs, shapes = their_names(config), parameter_shapes(config)
    layouts = {}
    for name in names:
        layouts[theirs[name]] = Layout(dtype, shapes[name])
        layouts |= {bias: Layout(dtype, (config.dim,)) for bias in _fourth_bias(name, config)}
    pairs = to_huggingface(((name, read(name)) for name in names), config)
    write_tensors(path, layouts, (tensor.detach().to("cpu", dtype).contiguous() for _, tensor in pairs))


def descriptions(files: Mapping[str, list[str]], config: ModelConfig, dtype: torch.dtype,
                 token_ids: Mapping[str, Any], generation: Mapping[str, Any] | None = None) -> dict[str, str]:
    """The text of the index of `files`, of config.json and of generation_config.json, by name.

    token_ids: bos_token_id, eos_token_id and others of that kind, as both configurations name them. generation: what
    else generation_config.json says.
    """
    theirs, shapes = their_names(config), parameter_shapes(config)
    size = sum(math.prod(shape) for shape in shapes.values()) * dtype.itemsize
    where = {their: file for file, names in files.items() for name in names
             for their in (theirs[name], *_fourth_bias(name, config))}
    size += (len(where) - len(shapes)) * config.dim * dtype.itemsize
    contents = {"model.safetensors.index.json": {"metadata": {"total_size": size}, "weight_map": where},
                "config.json": {**config_to_json(config, dtype), **token_ids},
                "generation_config.json": {**(generation or {}), **token_ids}}
    return {name: json.dumps(content, indent=2) + "\n" for name, content in contents.items()}


def read_folder(path: Path) -> tuple[ModelConfig, dict[str, Tensor]]:
    """The config and state dict of a folder in Hugging Face's shape, tensors in the dtype of the files.

    Reads what `stream_folder` writes and Llamas from the Hub, whether in one safetensors file or in shards.
    Raises ValueError for models that differ from ours (biases, other activations, other rotary scaling ...)
    and FileNotFoundError if a file is missing.
    """
    config = read_shape(path / "config.json")
    state_dict = dict(read_tensors(path, config))
    _check_fit({name: tuple(tensor.shape) for name, tensor in state_dict.items()}, parameter_shapes(config), config)
    return config, state_dict


def read_tensors(path: Path, config: ModelConfig) -> Iterator[tuple[str, Tensor]]:
    """The weights of such a folder as our (name, tensor) pairs, one at a time; unlike by `read_folder`, nothing is
    checked for being there."""
    from safetensors import safe_open

    index = path / "model.safetensors.index.json"
    if index.exists():
        files = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    else:
        files = ["model.safetensors"]
    for file in files:
        with safe_open(path / file, "pt") as opened:
            yield from from_huggingface(((name, opened.get_tensor(name)) for name in opened.keys()), config)  # noqa: SIM118


def their_names(config: ModelConfig) -> dict[str, str]:
    """Our parameter names and theirs."""
    names = dict(_OUTER_NAMES)
    of_block = {**_BLOCK_NAMES, **(_NORM_NAMES if config.qk_norm else {}), **(_BIAS_NAMES if config.qkv_bias else {})}
    for layer in range(config.layers):
        for ours, theirs in of_block.items():
            names[f"layers.{layer}.{ours}"] = f"model.layers.{layer}.{theirs}"
    return names


def _fourth_bias(name: str, config: ModelConfig) -> list[str]:
    """Their name of the bias that belongs to our parameter and is none of ours; [] for most."""
    if not (config.qkv_bias and name.endswith("attention.wo.weight")):
        return []
    return [f"model.{name.removesuffix('attention.wo.weight')}{_FOURTH_BIAS}"]


def zero_biases(config: ModelConfig) -> set[str]:
    """Their names of biases that our network has not: they have to be zero, and of shape (dim,)."""
    return {theirs for name in their_names(config) for theirs in _fourth_bias(name, config)}


def rotated_heads(name: str, config: ModelConfig) -> int | None:
    """How many heads' rows the parameter holds if the rotary embedding acts on them, else None. A norm's weight is one
    head, which all share."""
    match name.split(".")[-2:]:
        case ["wq", "weight" | "bias"]:
            return config.heads
        case ["wk", "weight" | "bias"]:
            return config.kv_heads
        case ["q_norm" | "k_norm", "weight"]:
            return 1
    return None


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


def _check_fit(
    found: Mapping[str, tuple[int, ...]], expected: Mapping[str, tuple[int, ...]], config: ModelConfig
) -> None:
    tied = {"output.weight"} if config.tied_embeddings else set()
    missing = sorted(expected.keys() - found.keys())
    unknown = sorted(found.keys() - expected.keys() - tied)
    if missing or unknown:
        raise ValueError(f"The weights do not fit the config: missing {missing[:8]}, unknown {unknown[:8]}.")
    for name, shape in expected.items():
        if found[name] != shape:
            raise ValueError(f"{name} is {found[name]}; by the config it should be {shape}.")


def _split(shapes: Mapping[str, tuple[int, ...]], itemsize: int, max_bytes: int) -> list[list[str]]:
    """Names in order, as groups of at most max_bytes (or a single name)."""
    if max_bytes <= 0:
        raise ValueError(f"max_shard_bytes must be above 0, not {max_bytes}.")
    shards: list[list[str]] = []
    room = 0
    for name, shape in shapes.items():
        size = math.prod(shape) * itemsize
        if not shards or size > room:
            shards.append([])
            room = max_bytes
        shards[-1].append(name)
        room -= size
    return shards
