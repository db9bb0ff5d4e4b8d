"""The files of a folder of weights in each form, as a list: what each is called and how it is written from any Weights.

Memory is needed for two or three tensors; for Meta's form, whose files torch.save writes, for one part.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from model.config import ModelConfig
from pipeline.errors import UserError
from pipeline.formats.base import Weights
from pipeline.formats.huggingface import parameter_shapes, shard_files, write_shard
from pipeline.formats.meta import Split
from pipeline.formats.meta_params import LLAMA2_THETA, PARAMS, PARTS, config_of, params_of
from pipeline.formats.shard_index import Entry, Index, run_of
from pipeline.formats.sharded_tensors import write_index
from pipeline.formats.tensor_file import DTYPE_NAMES, Layout, write_tensors
from pipeline.formats.weights import MODEL

Read = Callable[[str, Sequence[int] | None, Sequence[int] | None], Tensor]
"""A rectangle of a parameter: name, offset, shape, as `Weights.read`."""


@dataclass(frozen=True)
class OutputFile:
    """A file to be written: its name, how many rectangles of parameters it takes, and how to write it to a path."""

    name: str
    rectangles: int
    write: Callable[[Path], object]


def reader(weights: Weights, dtype: torch.dtype, done: Callable[[], None]) -> Read:
    """Reads rectangles in another type. `done` is called after each.

    Raises UserError, when read, for values that float16 cannot hold: they would become infinite in silence.
    """
    def read(name: str, offset: Sequence[int] | None = None, shape: Sequence[int] | None = None) -> Tensor:
        found = weights.read(name, offset, shape)
        converted = found.to(dtype)
        if dtype == torch.float16 and bool((converted.isinf() & ~found.isinf()).any()):
            raise UserError(f"{name} in {weights.path} has values beyond the largest of fp16, "
                            f"{torch.finfo(dtype).max:,.0f}. Take --dtype bf16 or fp32.")
        done()
        return converted
    return read


def huggingface_files(config: ModelConfig, dtype: torch.dtype, shard_bytes: int, read: Read) -> list[OutputFile]:
    """The safetensors files; their index and the configurations are `write_descriptions`."""
    def writer(names: list[str]) -> Callable[[Path], object]:
        return lambda path: write_shard(path, names, lambda name: read(name, None, None), config, dtype)
    return [OutputFile(file, len(names), writer(names))
            for file, names in shard_files(config, dtype, shard_bytes).items()]


def drover_files(config: ModelConfig, dtype: torch.dtype, shard_bytes: int, read: Read) -> list[OutputFile]:
    """The files of weights alone in the form of a training checkpoint's tensors (sharded_tensors.py)."""
    shapes, files, parts = parameter_shapes(config), [], []
    for number, names in enumerate(shard_files(config, dtype, shard_bytes).values()):
        layouts = {MODEL + name: Layout(dtype, shapes[name]) for name in names}
        files.append(OutputFile(f"weights-{number:05d}.safetensors", len(names), _tensors_writer(layouts, read)))
        parts.append(Index(({"path": files[-1].name},), {
            name: Entry(DTYPE_NAMES[dtype], layout.shape, tuple(run_of(0, layout.shape, [
                ((0,) * len(layout.shape), layout.shape)]))) for name, layout in layouts.items()}))
    index = Index.joined(parts)
    return [*files, OutputFile("index.json", 0, lambda path: write_index(path.parent, index))]


def _tensors_writer(layouts: dict[str, Layout], read: Read) -> Callable[[Path], object]:
    return lambda path: write_tensors(path, layouts, (read(name.removeprefix(MODEL), None, None).contiguous()
                                                      for name in layouts))


def meta_files(config: ModelConfig, parts: int, read: Read) -> list[OutputFile]:
    """The parts, and params.json. Models with Llama 2's rotary base have their embedding cut along its columns.

    Raises UserError if the model cannot be cut evenly into so many parts, or if params.json has no words for it.
    """
    _refuse_unsaid(config, parts)
    split = Split(parts, config.kv_heads, 1 if config.rope_theta == LLAMA2_THETA else 0)
    shapes = parameter_shapes(config)
    uneven = [f"{what} ({count:,})" for what, count in (
        ("heads", config.heads), ("the feed-forward width", config.hidden), ("the vocabulary", shapes[
            "tok_embeddings.weight"][0]), ("the width", config.dim)) if count % parts]
    if config.kv_heads % parts and parts % config.kv_heads:
        uneven.append(f"KV heads ({config.kv_heads})")
    if parts not in PARTS or uneven:
        fitting = [str(count) for count in PARTS if not any(value % count for value in (
            config.heads, config.hidden, shapes["tok_embeddings.weight"][0], config.dim))
            and (config.kv_heads % count == 0 or count % config.kv_heads == 0)]
        raise UserError(f"This model cannot be cut into {parts} parts"
                        f"{': ' + ', '.join(uneven) + ' cannot be divided' if uneven else ''}. Take --parts "
                        f"{' or '.join(fitting)}.")
    files = [OutputFile(f"consolidated.{part:02d}.pth", len(shapes), _part_writer(config, split, part, read))
             for part in range(parts)]
    text = json.dumps(params_of(config, parts)) + "\n"
    return [*files, OutputFile(PARAMS, 0, lambda path: path.write_text(text, encoding="utf-8"))]


def meta_reads(config: ModelConfig, parts: int) -> ModelConfig:
    """What a reader of params.json alone takes the model for."""
    return config_of(params_of(config, parts), vocab_size=config.vocab_size or 0, kv_heads=config.kv_heads,
                     tied=config.tied_embeddings)


def _refuse_unsaid(config: ModelConfig, parts: int) -> None:
    other_width = config.heads * config.head_width != config.dim
    if (other_width or config.qkv_bias or config.qk_norm or config.sliding_window is not None
            or config.no_rope_layer_interval is not None):
        raise UserError("Meta's model has no heads of another width, biases, normed queries and keys, sliding windows "
                        "or layers without a rotary embedding (head_dim, qkv_bias, qk_norm, sliding_window, "
                        "no_rope_layer_interval), and would compute something else with these weights. Take "
                        "--format hf.")
    read = meta_reads(config, parts)
    if read.rope_scaling != config.rope_scaling:
        raise UserError(f"Meta's {PARAMS} can only say that rotary wavelengths are stretched, and of a model of this "
                        f"shape its readers take that for {read.rope_scaling or 'none'}; here it is "
                        f"{config.rope_scaling}. Take --format hf.")


def _part_writer(config: ModelConfig, split: Split, part: int, read: Read) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        state: dict[str, Tensor] = {}
        for name, shape in parameter_shapes(config).items():
            state[name] = _alone(read(name, *split.rectangle(name, shape, part)))
        if config.tied_embeddings:  # under both names: Meta's model reads both, and torch.save stores it once
            embedding = "tok_embeddings.weight"
            rows = split.rectangle("output.weight", parameter_shapes(config)[embedding], part)
            state["output.weight"] = state[embedding] if split.embedding_axis == 0 else _alone(
                read(embedding, *rows))
        with open(path, "wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
    return write


def _alone(tensor: Tensor) -> Tensor:
    """The tensor in memory of its own: torch.save writes all of the memory that a view is of."""
    own = tensor.contiguous()
    return own if own.untyped_storage().nbytes() == own.nbytes else own.clone()
