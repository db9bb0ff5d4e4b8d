"""Write a folder in Hugging Face's format. pipeline/config/loading.py reads its config.json."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from drover.model.config import ModelConfig
from drover.model.huggingface import config_to_json
from drover.model.names import parameter_shapes, to_huggingface
from drover.pipeline.formats.tensor_file import FileLayout, MaybeDims, write_tensors


class Read(Protocol):
    """Reads a rectangle of a parameter by our name; without offset and shape, all of it."""

    def __call__(self, name: str, offset: MaybeDims = None, shape: MaybeDims = None, /) -> Tensor: ...


Stored = Callable[[str, Tensor], Iterable[tuple[str, Tensor]]]
"""Returns the names and tensors in a format's files of a parameter and its values."""


@dataclass(frozen=True)
class Source:
    """Weights to write: the network's shape, the element type, and a function that reads them in that type."""

    config: ModelConfig
    dtype: torch.dtype
    read: Read


@dataclass(frozen=True)
class OutputFile:
    """A file to write: its name, the number of rectangles that it reads, and a function that writes it to a path."""

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
        shard_bytes: largest size of a file, unless one tensor is larger. A tensor is read just before it is written, so
            that two or three are in memory at a time.
        token_ids: bos_token_id, eos_token_id and so on, for both configurations.
        generation: further settings of generation_config.json.
    """
    files = list[OutputFile]()
    where = dict[str, str]()
    size = 0
    for file, layouts in tensor_files(source, shard_bytes, partial(to_huggingface, config=source.config)):
        files.append(file)
        where |= dict.fromkeys(layouts, file.name)
        size += sum(layout.size for layout in layouts.values())
    contents = {"model.safetensors.index.json": {"metadata": {"total_size": size}, "weight_map": where},
                "config.json": {**config_to_json(source.config, source.dtype), **token_ids},
                "generation_config.json": {**(generation or {}), **token_ids}}
    return [*files, *(text_file(name, json.dumps(content, indent=2) + "\n") for name, content in contents.items())]


def tensor_files(source: Source, most_bytes: int, stored: Stored) -> Iterator[tuple[OutputFile, dict[str, FileLayout]]]:
    """The safetensors files of all parameters, each with the layouts of its tensors.

    most_bytes: largest size of a file, unless one tensor is larger.
    """
    shapes = parameter_shapes(source.config)
    groups = list[list[str]]()
    room = 0
    for name, shape in shapes.items():
        size = math.prod(shape) * source.dtype.itemsize
        if not groups or size > room:
            groups.append([])
            room = most_bytes
        groups[-1].append(name)
        room -= size
    for number, names in enumerate(groups):
        layouts = {theirs: FileLayout(source.dtype, tuple(tensor.shape)) for name in names
                   for theirs, tensor in stored(name, torch.empty(shapes[name], device="meta"))}
        yield OutputFile(f"model-{number + 1:05d}-of-{len(groups):05d}.safetensors", len(names),
                         partial(_write, source=source, names=names, layouts=layouts, stored=stored)), layouts


def _write(path: Path, source: Source, names: list[str], layouts: dict[str, FileLayout],
           stored: Stored) -> None:
    write_tensors(path, layouts, (tensor.detach().to("cpu", source.dtype).contiguous() for name in names
                                  for _, tensor in stored(name, source.read(name))))


def write_folder(folder: Path, files: list[OutputFile]) -> None:
    """Write files into a folder, one after the other."""
    folder.mkdir(parents=True, exist_ok=True)
    for file in files:
        file.write(folder / file.name)
