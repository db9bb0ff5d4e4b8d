"""The ranks as one array, (pipeline, replicate, shard, context, tensor), and the part of each tensor on each rank.

Every process group is a slice of this array. Neighbouring ranks differ in the last axis, which has the most traffic, so
a tensor group is within a node. Weights are sharded over shard and context ranks together, because context parallelism
splits activations only.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _set_pg_timeout
from torch.distributed.tensor import DTensor, Shard

from drover.pipeline.config.checks import grid_problems
from drover.pipeline.config.training import GridSizes, ParallelConfig
from drover.pipeline.core.errors import UserError, listed
from drover.pipeline.parallel.ranks import Ranks

AXES = GridSizes._fields
WEIGHTS = "weights"
"""The axis of shard and context together."""


@dataclass(frozen=True)
class LocalShard:
    """The rectangle of a parameter that this rank holds, and which copy of it this is.

    offset, size: of the rectangle in the whole parameter, by dimension. copy: this rank's number among the `copies`
    ranks that hold the same rectangle.
    """

    offset: tuple[int, ...]
    size: tuple[int, ...]
    copy: int
    copies: int


class Grid:
    """All ranks as an array; this rank's place in it. Raises UserError with the numbers if they do not fit.

    Attributes:
        pipeline, replicate, shard, context, tensor: the lengths of its axes.
        pipeline_rank, replica, shard_rank, context_rank, tensor_rank: this rank's number in its group along each.
    """

    def __init__(self, ranks: Ranks, parallel: ParallelConfig) -> None:
        self.ranks = ranks
        if problems := grid_problems(parallel, ranks.world):
            raise UserError(listed(problems))
        self.sizes = parallel.sizes(ranks.world)
        self.pipeline, self.replicate, self.shard, self.context, self.tensor = self.sizes
        self.pipeline_rank, self.replica, self.shard_rank, self.context_rank, self.tensor_rank = self.place(ranks.rank)

    def place(self, rank: int) -> list[int]:
        """A rank's number along each axis."""
        return [int(number) for number in np.unravel_index(rank, self.sizes)]

    @cached_property
    def mesh(self) -> DeviceMesh:
        """The array as torch's mesh, without the axes of length 1; creating it is a collective. torch's messages about
        timeouts call its groups `mesh_` and the axis, or `default_pg` if an axis holds all ranks."""
        kept = {axis: length for axis, length in zip(AXES, self.sizes, strict=True) if length > 1 or axis == "shard"}
        return self._patient(init_device_mesh(self.ranks.device.type, tuple(kept.values()),
                                              mesh_dim_names=tuple(kept)))

    def _patient(self, mesh: DeviceMesh) -> DeviceMesh:
        for group in mesh.get_all_groups():  # created with torch's own timeout: 10 minutes for nccl
            _set_pg_timeout(self.ranks.patience, group)
        return mesh

    @cached_property
    def weights_mesh(self) -> DeviceMesh:
        """The part of the mesh over which FSDP2 shards weights and reduces gradients; creating it is a collective."""
        if self.context == 1:
            return self.mesh["replicate", "shard"] if self.replicate > 1 else self.mesh["shard"]
        flat = self._patient(self.mesh["shard", "context"]._flatten(WEIGHTS))
        if self.replicate == 1:
            return flat
        with warnings.catch_warnings():  # torch has no other public way to combine a flattened axis with another
            warnings.filterwarnings("ignore", "Slicing a flattened dim")
            return self.mesh["replicate", WEIGHTS]

    @property
    def data_ranks(self) -> int:
        """How many groups of ranks see different samples."""
        return self.replicate * self.shard

    @property
    def data_rank(self) -> int:
        """The number of this rank's group among them."""
        return self.replica * self.shard + self.shard_rank

    @property
    def sample_ranks(self) -> int:
        """How many neighbouring ranks see the same samples: those of a context and tensor group."""
        return self.context * self.tensor

    @property
    def speaks(self) -> bool:
        """Whether this is the one rank, of those that see the same samples, that counts in sums over samples."""
        return self.pipeline_rank == self.context_rank == self.tensor_rank == 0

    @property
    def weight_shards(self) -> int:
        """Over how many ranks the rows of a weight are sharded."""
        return self.shard * self.context

    @property
    def copy_ranks(self) -> int:
        """How many ranks together hold one replica of the model, or of one pipeline rank's part of it. They are
        neighbours, those of the first replica first."""
        return self.weight_shards * self.tensor

    @cached_property
    def copy_group(self) -> dist.ProcessGroup | None:
        """The ranks that together with this one hold one replica, or a pipeline rank's part of it. None: all ranks.
        Creating it is a collective."""
        if self.replicate == self.pipeline == 1:
            return None
        if self.tensor == 1:
            return self.weights_mesh.get_group(self.weights_mesh.ndim - 1)
        if self.weight_shards == 1:
            return self.mesh["tensor"].get_group()
        copies = [dist.new_group(list(range(first, first + self.copy_ranks)), timeout=self.ranks.patience,
                                 group_desc="copy")
                  for first in range(0, self.ranks.world, self.copy_ranks)]
        return copies[self.ranks.rank // self.copy_ranks]

    @cached_property
    def replicate_group(self) -> dist.ProcessGroup:
        """This rank, and the ranks that have its place in the other replicas."""
        return self.mesh["replicate"].get_group()

    def part(self, parameter: torch.Tensor, rank: int | None = None) -> LocalShard:
        """What a rank, by default this one, holds of a parameter: first split over the tensor group, then by rows over
        the shard and context groups (the order in which FSDP2 and tensor parallelism nest)."""
        rank = self.ranks.rank if rank is None else rank
        shape = list(parameter.shape)
        if not isinstance(parameter, DTensor):
            return LocalShard((0,) * len(shape), tuple(shape), rank, self.ranks.world)
        offset, size = [0] * len(shape), shape
        _, copy, shard_rank, context_rank, tensor_rank = self.place(rank)
        copies = self.replicate
        if self.tensor > 1:
            placement = parameter.placements[-1]  # FSDP2's own axes come first
            if isinstance(placement, Shard):
                offset[placement.dim], size[placement.dim] = _slice(size[placement.dim], self.tensor, tensor_rank)
            else:
                copy, copies = copy * self.tensor + tensor_rank, copies * self.tensor
        start, size[0] = _slice(size[0], self.weight_shards, shard_rank * self.context + context_rank)
        offset[0] += start
        assert rank != self.ranks.rank or tuple(size) == tuple(own(parameter).shape), (tuple(size), parameter)
        return LocalShard(tuple(offset), tuple(size), copy, copies)


def own(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds of a tensor that may be spread, as a view of its memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _slice(length: int, parts: int, number: int) -> tuple[int, int]:
    """(start, length) of a part, as torch.chunk cuts."""
    step = -(-length // parts)
    start = min(length, number * step)
    return start, min(length, start + step) - start
