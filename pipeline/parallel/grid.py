"""The ranks as one array, (replicate, shard, tensor), and which part of a tensor lies where in it.

Every process group is a slice of this array. Neighbouring ranks differ in the last axis, whose traffic is the
heaviest, so a tensor group lies within a node. Context parallelism will be an axis between shard and tensor,
pipeline parallelism one before replicate.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from pipeline.config.checks import grid_problems
from pipeline.config.parallel import ParallelConfig
from pipeline.errors import UserError, listed
from pipeline.parallel.ranks import PATIENCE, Ranks

AXES = ("replicate", "shard", "tensor")


@dataclass(frozen=True)
class LocalShard:
    """The rectangle of a parameter that this rank holds, and which of its copies it is.

    offset, size: where it begins and how far it reaches in the whole, by dimension. copy: this rank's number among
    the `copies` ranks that hold the same rectangle.
    """

    offset: tuple[int, ...]
    size: tuple[int, ...]
    copy: int
    copies: int


class Grid:
    """All ranks as an array; this rank's place in it."""

    def __init__(self, ranks: Ranks, parallel: ParallelConfig) -> None:
        self.ranks = ranks
        self.replicate, self.shard, self.tensor = sizes(parallel, ranks.world)

    @cached_property
    def mesh(self) -> DeviceMesh:
        """The array as torch knows it; making it is a collective."""
        return init_device_mesh(self.ranks.device.type, (self.replicate, self.shard, self.tensor),
                                mesh_dim_names=AXES)

    @property
    def data_ranks(self) -> int:
        """How many ranks see different samples; those of a tensor group see the same."""
        return self.replicate * self.shard

    @property
    def data_rank(self) -> int:
        """This rank's number among them."""
        return self.ranks.rank // self.tensor

    @property
    def tensor_rank(self) -> int:
        """This rank's number in its tensor group. Number 0 speaks for the group where sums over samples are made."""
        return self.ranks.rank % self.tensor

    @property
    def replica(self) -> int:
        """Which copy of the sharded model this rank belongs to."""
        return self.ranks.rank // (self.tensor * self.shard)

    @property
    def copy_ranks(self) -> int:
        """How many ranks hold one copy of the model together. They are neighbours, those of the first copy first."""
        return self.shard * self.tensor

    @cached_property
    def copy_group(self) -> dist.ProcessGroup | None:
        """The ranks that hold one copy of the model together with this one, None for all; making it is a collective."""
        if self.replicate == 1:
            return self.ranks.group
        if 1 in (self.shard, self.tensor):
            return self.mesh["shard" if self.tensor == 1 else "tensor"].get_group()
        copies = [dist.new_group(list(range(first, first + self.copy_ranks)), timeout=PATIENCE)
                  for first in range(0, self.ranks.world, self.copy_ranks)]
        return copies[self.replica]

    @cached_property
    def replicate_group(self) -> dist.ProcessGroup:
        """The ranks that have this one's place in the other copies, and this one."""
        return self.mesh["replicate"].get_group()

    def part(self, parameter: torch.Tensor, rank: int | None = None) -> LocalShard:
        """What a rank, by default this one, holds of a parameter that `spread` has placed: first split over the tensor
        group, then by rows over the shard group (the order in which FSDP2 and tensor parallelism nest)."""
        rank = self.ranks.rank if rank is None else rank
        shape = list(parameter.shape)
        if not isinstance(parameter, DTensor):
            return LocalShard((0,) * len(shape), tuple(shape), rank, self.ranks.world)
        offset, size = [0] * len(shape), shape
        copy, copies, tensor_rank = rank // self.copy_ranks, self.replicate, rank % self.tensor
        if self.tensor > 1:
            placement = parameter.placements[-1]  # FSDP2 puts its own axes before
            if isinstance(placement, Shard):
                offset[placement.dim], size[placement.dim] = _slice(size[placement.dim], self.tensor, tensor_rank)
            else:
                copy, copies = copy * self.tensor + tensor_rank, copies * self.tensor
        start, size[0] = _slice(size[0], self.shard, rank // self.tensor % self.shard)
        offset[0] += start
        assert rank != self.ranks.rank or tuple(size) == tuple(own(parameter).shape), (tuple(size), parameter)
        return LocalShard(tuple(offset), tuple(size), copy, copies)


def own(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds of a tensor that may be spread, as a view of its memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def sizes(parallel: ParallelConfig, ranks: int) -> tuple[int, int, int]:
    """The lengths of the axes; UserError with the numbers where they do not make up `ranks`."""
    if problems := grid_problems(parallel, ranks):
        raise UserError(listed(problems))
    return parallel.sizes(ranks)


def _slice(length: int, parts: int, number: int) -> tuple[int, int]:
    """(start, length) of a part, as torch.chunk cuts."""
    step = -(-length // parts)
    start = min(length, number * step)
    return start, min(length, start + step) - start
