"""Whole matrices of sharded ones: each is assembled on one rank, its owner, transformed there, and sent back.

A product of a whole matrix on one rank has the same bits under every layout of ranks. Products of sharded matrices
(torch's own on DTensors) add up in another order, and communicate each time. A step has three exchanges, for any number
of matrices:

    1. within a copy of the model, every rank sends its pieces of matrices that this copy owns to their owners;
    2. the owners send the results' pieces back;
    3. between copies, ranks of the same place exchange the pieces of results, since each copy computed its share only.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Mapping, Sequence
from itertools import chain

import torch
import torch.distributed as dist
from torch import Tensor

from drover.pipeline.parallel.grid import Grid, LocalShard


def assign_owners(shapes: Mapping[str, Sequence[int]], ranks: int) -> dict[str, int]:
    """The owner of each matrix: the next most expensive one goes to the rank with the least work.

    A product of a matrix with its own transpose costs rows x columns x the shorter of them. The same arguments give the
    same owners on every rank.
    """
    load = [(0, rank) for rank in range(ranks)]
    owners = {}
    for name in sorted(shapes, key=lambda name: (-_cost(shapes[name]), name)):
        done, rank = heapq.heappop(load)
        owners[name] = rank
        heapq.heappush(load, (done + _cost(shapes[name]), rank))
    return owners


def _cost(shape: Sequence[int]) -> int:
    return math.prod(shape) * min(shape)


class MatrixExchange:
    """Matrices sharded over `grid`, by name. Made and used on all ranks alike.

    Args:
        parameters: the sharded matrices; only their shapes and places are used.
    """

    def __init__(self, parameters: Mapping[str, Tensor], grid: Grid) -> None:
        self.grid = grid
        self.shapes = {name: tuple(parameter.shape) for name, parameter in parameters.items()}
        # All replicas of the model are sharded alike, so the places in the first hold for all.
        self.places = {name: [grid.part(parameter, rank) for rank in range(grid.copy_ranks)]
                       for name, parameter in parameters.items()}
        self.owners = assign_owners(self.shapes, grid.replicate * grid.copy_ranks)
        self.copy_rank = grid.ranks.rank % grid.copy_ranks
        if grid.ranks.world > 1:  # making groups is a collective: do it now, not in the first step
            _ = grid.copy_group, grid.replicate > 1 and grid.replicate_group

    def transform(self, pieces: Mapping[str, Tensor], function: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
        """Apply `function` to every whole matrix. Each rank passes and receives its own piece.

        Args:
            pieces: this rank's rectangle of each matrix, in one element type and on its device.
            function: from a whole matrix to another of the same shape and element type. Called on the matrix's owner.
        """
        if self.grid.ranks.world == 1:
            return {name: function(piece) for name, piece in pieces.items()}
        like = next(iter(pieces.values()))
        copy = self.grid.replica
        copy_rank = self.copy_rank
        ranks = range(self.grid.copy_ranks)
        owned = [self._owned(copy, rank) for rank in ranks]
        mine = owned[copy_rank]
        gathered = self._exchange([[pieces[name] for name in names] for names in owned],
                                  [[self.places[name][rank].size for name in mine] for rank in ranks], like)
        results = []
        for name, *parts in zip(mine, *gathered, strict=True):
            matrix = like.new_empty(self.shapes[name])
            for place, part in zip(self.places[name], parts, strict=True):
                _cut(matrix, place).copy_(part)
            results.append(function(matrix))
        returned = self._exchange([[_cut(result, self.places[name][rank]) for name, result in
                                    zip(mine, results, strict=True)] for rank in ranks],
                                  [[self.places[name][copy_rank].size for name in names] for names in owned], like)
        value = dict(zip(chain(*owned), chain(*returned), strict=True))
        return self._share(value, like) if self.grid.replicate > 1 else value

    def _owned(self, copy: int, rank: int) -> list[str]:
        """The matrices that a rank of a copy owns."""
        owner = copy * self.grid.copy_ranks + rank
        return [name for name in self.shapes if self.owners[name] == owner]

    def _exchange(self, outgoing: Sequence[Sequence[Tensor]], incoming: Sequence[Sequence[Sequence[int]]],
                  like: Tensor) -> list[list[Tensor]]:
        """Send the tensors outgoing[rank] to each rank of this replica. Returns those received from each rank, of the
        shapes in incoming."""
        if self.grid.copy_ranks == 1:
            return [list(tensors) for tensors in outgoing]
        counts = [sum(map(math.prod, shapes)) for shapes in incoming]
        received = like.new_empty(sum(counts))
        dist.all_to_all_single(received, _flat([*chain(*outgoing)], like), counts,
                               [sum(tensor.numel() for tensor in tensors) for tensors in outgoing],
                               group=self.grid.copy_group)
        return [_shaped(part, shapes) for part, shapes in zip(received.split(counts), incoming, strict=True)]

    def _share(self, pieces: dict[str, Tensor], like: Tensor) -> dict[str, Tensor]:
        """Add the pieces with this rank's place that other replicas computed."""
        owned = [[name for rank in range(self.grid.copy_ranks) for name in self._owned(copy, rank)]
                 for copy in range(self.grid.replicate)]
        shapes = [[self.places[name][self.copy_rank].size for name in names] for names in owned]
        own = _flat([pieces[name] for name in owned[self.grid.replica]], like)
        sent = like.new_zeros(max(sum(map(math.prod, sizes)) for sizes in shapes))
        sent[:len(own)] = own
        received = [torch.empty_like(sent) for _ in owned]
        dist.all_gather(received, sent, group=self.grid.replicate_group)
        shared = map(_shaped, received, shapes)
        return dict(zip(chain(*owned), chain(*shared), strict=True))


def _cut(matrix: Tensor, place: LocalShard) -> Tensor:
    """The rectangle of a whole matrix that lies at a place, as a view."""
    return matrix[tuple(slice(start, start + count) for start, count in zip(place.offset, place.size, strict=True))]


def _flat(tensors: Sequence[Tensor], like: Tensor) -> Tensor:
    """All elements in a row."""
    return torch.cat([tensor.reshape(-1) for tensor in tensors]) if tensors else like.new_empty(0)


def _shaped(flat: Tensor, shapes: Sequence[Sequence[int]]) -> list[Tensor]:
    """Views of consecutive tensors with these shapes; the rest of `flat` is padding."""
    sizes = [math.prod(shape) for shape in shapes]
    return [part.view(tuple(shape)) for part, shape in
            zip(flat[:sum(sizes)].split(sizes), shapes, strict=True)] if sizes else []
