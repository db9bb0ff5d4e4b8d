"""Tensors cut into rectangles, as ranks own them."""

import random

import torch

from drover.pipeline.formats.sharded_tensors import Index, TensorShard, write_index, write_part


def cut(shape, cuts, chance):
    """Rectangles (offset, size) that cover `shape`, from that many cuts at random places; some may be empty."""
    rectangles = [((0,) * len(shape), tuple(shape))]
    for _ in range(cuts if shape else 0):
        offset, size = rectangles.pop(chance.randrange(len(rectangles)))
        axis = chance.randrange(len(shape))
        at = chance.randint(0, size[axis])
        for start, length in ((0, at), (at, size[axis] - at)):
            rectangles.append(((*offset[:axis], offset[axis] + start, *offset[axis + 1:]),
                          (*size[:axis], length, *size[axis + 1:])))
    return rectangles


def part_of(tensor, offset, size):
    """That rectangle of a tensor, as a view."""
    return tensor[tuple(slice(start, start + length) for start, length in zip(offset, size, strict=True))]


def rectangle(shape, chance):
    """The offset and size of one, empty ones among them."""
    offset = [chance.randint(0, size) for size in shape]
    return offset, [chance.randint(0, size - start) for start, size in zip(offset, shape, strict=True)]


def read_alike(weights, model, chance):
    """Assert that an opened folder has a model's names, tensors and any rectangles of them."""
    assert [*weights.shapes] == [name for name, _ in model.named_parameters()]
    for name, parameter in model.named_parameters():
        assert torch.equal(weights.read(name), parameter) and weights.dtype(name) == torch.float32
        for _ in range(6):
            offset, size = rectangle(parameter.shape, chance)
            assert torch.equal(weights.read(name, offset, size), part_of(parameter, offset, size)), (name, offset, size)


def piece(tensor, offset, size):
    """The rectangle as what a rank would hand out."""
    return TensorShard(part_of(tensor, offset, size).contiguous(), tuple(offset), tuple(tensor.shape))


def whole(tensor):
    """All of a tensor as one piece."""
    return TensorShard(tensor, (0,) * tensor.dim(), tuple(tensor.shape))


def write_checkpoint(folder, tensors, ranks=3, cuts=4, seed=0):
    """Write tensors as if `ranks` ranks owned pieces of them; returns the records of all files."""
    chance = random.Random(seed)
    owned = [{} for _ in range(ranks)]
    for name, tensor in tensors.items():
        for offset, size in cut(tensor.shape, cuts, chance):
            owned[chance.randrange(ranks)].setdefault(name, []).append(piece(tensor, offset, size))
    folder.mkdir(parents=True, exist_ok=True)
    parts = [write_part(folder / f"rank-{rank:05d}.safetensors", pieces) for rank, pieces in enumerate(owned)]
    index = Index.joined(parts)
    return [*index.files, write_index(folder, index)]
