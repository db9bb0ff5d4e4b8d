"""What each rank of a layout owns of each parameter, by the arithmetic of engines, for ranks that are not there."""

from __future__ import annotations

import zlib
from collections.abc import Callable

import torch

from model.config import ModelConfig
from pipeline.formats.huggingface import parameter_shapes
from pipeline.formats.shard_index import Rectangle, rectangles

Owned = Callable[[int, str], list[Rectangle]]
"""(rank, parameter) -> the rectangles that it saves."""


def held_by_fsdp(model: ModelConfig, ranks: int, tensor: int, replicate: int) -> Callable[[int, str], Rectangle]:
    """(rank, parameter) -> the rectangle that it holds under FSDP2 with tensor parallelism, as `Grid.part` has it."""
    shapes, shard = parameter_shapes(model), ranks // tensor // replicate

    def held(rank: int, name: str) -> Rectangle:
        shape = shapes[name]
        offset, size = [0] * len(shape), list(shape)
        if tensor > 1 and len(shape) > 1:
            axis = 1 if name.split(".")[-2] in ("wo", "w2") else 0
            offset[axis], size[axis] = chunk(shape[axis], tensor, rank % tensor)
        start, size[0] = chunk(size[0], shard, rank // tensor % shard)
        offset[0] += start
        return tuple(offset), tuple(size)
    return held


def saved_by_fsdp(model: ModelConfig, ranks: int, tensor: int, replicate: int) -> Owned:
    """Of what it holds, what it saves: copies are dealt out, as `FsdpEngine.state_shards` does."""
    held, shapes = held_by_fsdp(model, ranks, tensor, replicate), parameter_shapes(model)

    def saved(rank: int, name: str) -> list[Rectangle]:
        copy, copies = rank // (ranks // replicate), replicate
        if tensor > 1 and len(shapes[name]) == 1:  # norms, which a tensor group does not split
            copy, copies = copy * tensor + rank % tensor, copies * tensor
        found = held(rank, name)
        return [found] if zlib.crc32(name.encode()) % copies == copy and all(found[1]) else []
    return saved


def saved_by_zero(model: ModelConfig, ranks: int) -> Owned:
    """Under ZeRO stage 3, which cuts each parameter into equal ranges of elements."""
    shapes = parameter_shapes(model)

    def saved(rank: int, name: str) -> list[Rectangle]:
        elements = torch.Size(shapes[name]).numel()
        start, count = chunk(elements, ranks, rank)
        return list(rectangles(shapes[name], start, start + count))
    return saved


def chunk(length: int, parts: int, number: int) -> tuple[int, int]:
    """(start, length) as torch.chunk cuts."""
    step = -(-length // parts)
    start = min(length, number * step)
    return start, min(length, start + step) - start
