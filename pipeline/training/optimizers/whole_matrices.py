"""Whole matrices of spread ones: each is put together on one rank, its owner, computed with there, and sent back.

A product of a whole matrix on one rank has the same bits under every layout of ranks; products of spread matrices
(torch's own on DTensors) add up in another order, and communicate each time. A step has two exchanges, whatever the
number of matrices: within a copy of the model, every rank sends its pieces of matrices that this copy owns to their
owners; then the owners send the results' pieces to the ranks of all copies.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from drover.pipeline.parallel.grid import Grid, LocalShard


def assign_owners(shapes: Mapping[str, Sequence[int]], ranks: int) -> dict[str, int]:
    """Which rank computes with which matrix: the next costliest goes to the rank that has least to do.

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


class WholeMatrices:
    """Matrices spread over `grid`, by name. Made, and used, on all ranks alike.

    Args:
        parameters: the spread matrices, of which only shapes and places count.
    """

    def __init__(self, parameters: Mapping[str, Tensor], grid: Grid) -> None:
        self.shapes = {name: tuple(parameter.shape) for name, parameter in parameters.items()}
        # Copies of the model lie in it alike: the places in the first are those in all.
        self.places = {name: [grid.part(parameter, rank) for rank in range(grid.copy_ranks)]
                       for name, parameter in parameters.items()}
        members, self.copy_ranks = grid.replicate * grid.copy_ranks, grid.copy_ranks
        owners = assign_owners(self.shapes, members)
        self.owned = [[name for name in self.shapes if owners[name] == member] for member in range(members)]
        self.here = grid.ranks.rank % members
        # Making a group is a collective: not to be left to the first step.
        self.group = grid.stage_group if members > 1 else None

    def transform(self, pieces: Mapping[str, Tensor], function: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
        """`function` of every whole matrix, of which each rank gives and gets its own piece.

        Args:
            pieces: this rank's rectangle of each matrix, in one element type and on its device.
            function: from a whole matrix to another of the same shape and element type. Called on the matrix's owner.
        """
        like, mine = next(iter(pieces.values())), self.owned[self.here]
        whole = pieces if self.copy_ranks == 1 else self._gathered(pieces, mine, like)
        results = [function(whole[name]) for name in mine]
        if len(self.owned) == 1:
            return dict(zip(mine, results, strict=True))
        returned = self._exchange(
            [[_cut(result, self._place(name, member)) for name, result in zip(mine, results, strict=True)]
             for member in range(len(self.owned))],
            [[self._place(name, self.here).size for name in owned] for owned in self.owned], like)
        return {name: piece for owned, part in zip(self.owned, returned, strict=True)
                for name, piece in zip(owned, part, strict=True)}

    def _gathered(self, pieces: Mapping[str, Tensor], mine: Sequence[str], like: Tensor) -> dict[str, Tensor]:
        """The whole matrices that this rank owns, of the pieces in its copy of the model."""
        copies = [member // self.copy_ranks == self.here // self.copy_ranks for member in range(len(self.owned))]
        received = self._exchange(
            [[pieces[name] for name in owned] if here else [] for owned, here in zip(self.owned, copies, strict=True)],
            [[self._place(name, member).size for name in mine] if here else [] for member, here in enumerate(copies)],
            like)
        whole = {name: like.new_empty(self.shapes[name]) for name in mine}
        for member, parts in enumerate(received):
            for name, part in zip(mine, parts, strict=False):  # other copies send nothing
                _cut(whole[name], self._place(name, member)).copy_(part)
        return whole

    def _place(self, name: str, member: int) -> LocalShard:
        return self.places[name][member % self.copy_ranks]

    def _exchange(self, outgoing: Sequence[Sequence[Tensor]], incoming: Sequence[Sequence[Sequence[int]]],
                  like: Tensor) -> list[list[Tensor]]:
        """Send the tensors outgoing[member] to each member; what came from each, of the shapes in incoming."""
        counts = [sum(map(math.prod, shapes)) for shapes in incoming]
        received = like.new_empty(sum(counts))
        sent = [tensor.reshape(-1) for tensors in outgoing for tensor in tensors]
        dist.all_to_all_single(received, torch.cat(sent) if sent else like.new_empty(0), counts,
                               [sum(tensor.numel() for tensor in tensors) for tensors in outgoing], group=self.group)
        return [[piece.view(tuple(shape)) for piece, shape in zip(part.split([*map(math.prod, shapes)]), shapes,
                                                                  strict=True)] if shapes else []
                for part, shapes in zip(received.split(counts), incoming, strict=True)]


def _cut(whole: Tensor, place: LocalShard) -> Tensor:
    """The rectangle of a whole matrix that lies at a place, as a view."""
    return whole[tuple(slice(start, start + count) for start, count in zip(place.offset, place.size, strict=True))]
