"""The files of a folder in Hugging Face's form."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from drover.model.config import ModelConfig
from drover.model.names import parameter_shapes, to_huggingface
from drover.pipeline.formats.huggingface_config import config_to_json
from drover.pipeline.formats.tensor_file import Layout, write_tensors


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
