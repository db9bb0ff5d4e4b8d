"""Muon for the blocks' matrices, AdamW for embeddings, output matrix and norms (Jordan et al. 2024).

A matrix's update is its momentum made orthogonal: all its singular values are brought near 1 by Newton-Schulz
iterations, so that rare directions are learned as fast as common ones. That needs the whole matrix. The momentum stays
spread like the matrix, and so is saved as pieces that any layout reads.

The update is scaled to the size that AdamW's have (root mean square 0.2; Liu et al. 2025, "Muon is scalable for LLM
training"), so that lr, schedule and weight decay are shared by both.

Whole matrices of sharded ones: each is assembled on one rank, its owner, transformed there, and sent back. A product of
a whole matrix on one rank has the same bits under every layout of ranks. Products of sharded matrices (torch's own on
DTensors) add up in another order, and communicate each time. A step has three exchanges, for any number of matrices:

    1. within a copy of the model, every rank sends its pieces of matrices that this copy owns to their owners;
    2. the owners send the results' pieces back;
    3. between copies, ranks of the same place exchange the pieces of results, since each copy computed its share only.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain

import torch
import torch.distributed as dist
from torch import Tensor

from drover.model.loss import wide
from drover.pipeline.config.optimizers import optimizer_settings
from drover.pipeline.config.tree import Config
from drover.pipeline.core.errors import UserError
from drover.pipeline.parallel.grid import Grid, LocalShard, own
from drover.pipeline.training.optimizers import AdamW, Optimizer, Weight


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


COEFFICIENTS = (3.4445, -4.775, 2.0315)
"""Of the polynomial a x + b x^3 + c x^5, applied to singular values in each iteration: five of them bring whatever is
above 0.003 or so to between 0.7 and 1.2. Jordan's choice, steep at 0."""
UPDATE_RMS = 0.2
"""Root mean square of an AdamW update over its learning rate, as measured by Liu et al."""
EPSILON = 1e-7
COMPUTED_IN = {"cuda": torch.bfloat16, "cpu": torch.float32}
"""The element type of the iterations by device: bfloat16 products are slow or absent on CPUs."""


class Muon(Optimizer):
    """Both optimizers over one model. Settings: momentum, nesterov, iterations (of Newton-Schulz).

    The element type of the iterations, in which matrices also travel: bfloat16 on GPUs as in the original, float32 on
    CPUs, where bfloat16 products are slow or absent; float64 where weights are.
    """

    def __init__(self, weights: Sequence[Weight], config: Config, grid: Grid) -> None:
        settings = optimizer_settings(config.train)
        self.decay = settings["momentum"]
        self.nesterov = settings["nesterov"]
        self.iterations = settings["iterations"]
        if not (0 <= self.decay < 1 and self.iterations > 0):
            raise UserError(f"train.optimizer_settings: momentum must be at least 0 and below 1, and iterations at "
                            f"least 1; they are {self.decay} and {self.iterations}.")
        self.matrices = [weight for weight in weights if weight.is_block_matrix]
        self.others = AdamW([weight for weight in weights if not weight.is_block_matrix], config)
        self.momentum = {weight.name: torch.zeros_like(own(weight.parameter.detach())) for weight in self.matrices}
        self.matrix_exchange = MatrixExchange({weight.name: weight.parameter for weight in self.matrices}, grid)
        self.dtype = torch.float64 if self.others.wide else COMPUTED_IN.get(grid.ranks.device.type, torch.float32)

    def state_names(self, name: str) -> tuple[str, ...]:
        """See Optimizer."""
        return ("momentum",) if name in self.momentum else self.others.state_names(name)

    def state(self, name: str) -> dict[str, Tensor]:
        """See Optimizer."""
        return {"momentum": self.momentum[name]} if name in self.momentum else self.others.state(name)

    def resume(self, updates: int) -> None:
        """See Optimizer."""
        self.others.resume(updates)

    @torch.no_grad()
    def step(self, lr: float, clip: Tensor, applied: Tensor) -> None:
        """See Optimizer. A rejected update is computed too, since only the device knows that it is rejected."""
        self.others.step(lr, clip, applied)
        directions = self._directions(clip, applied)
        updates = self.matrix_exchange.transform(directions, partial(orthogonal, iterations=self.iterations))
        for weight in self.matrices:
            local = own(weight.parameter)
            rate = lr * weight.lr_factor
            size = rate * UPDATE_RMS * math.sqrt(max(weight.parameter.shape))
            changed = local * (1 - rate * weight.weight_decay) - size * updates[weight.name].to(local.dtype)
            local.copy_(torch.where(applied, changed, local))

    def _directions(self, clip: Tensor, applied: Tensor) -> dict[str, Tensor]:
        """This rank's pieces of the matrices to orthogonalize. Updates the momentum."""
        names = [weight.name for weight in self.matrices]
        momenta = [self.momentum[name] for name in names]
        result = [torch.zeros_like(momentum) if weight.parameter.grad is None else own(weight.parameter.grad)
                 for weight, momentum in zip(self.matrices, momenta, strict=True)]
        torch._foreach_div_(result, clip)
        fresh = torch._foreach_lerp(momenta, result, 1 - self.decay)
        directions = torch._foreach_lerp(result, fresh, self.decay) if self.nesterov else fresh
        for momentum, new in zip(momenta, fresh, strict=True):
            momentum.copy_(torch.where(applied, new, momentum))
        return {name: direction.to(self.dtype) for name, direction in zip(names, directions, strict=True)}


def orthogonal(matrix: Tensor, iterations: int) -> Tensor:
    """U p(S) V^T of a matrix U S V^T, where p brings singular values near 1: Newton-Schulz with COEFFICIENTS.

    matrix: (rows, columns), float; not changed. The result has its shape, element type and device.
    """
    first, third, fifth = COEFFICIENTS
    tall = matrix.shape[0] > matrix.shape[1]
    value = matrix.T if tall else matrix  # the products are of the shorter side
    norm = torch.linalg.vector_norm(value, dtype=wide(value.dtype))
    value = value / norm.clamp(min=EPSILON).to(value.dtype)  # no singular value above 1
    for _ in range(iterations):
        square = value @ value.T
        polynomial = torch.addmm(square, square, square, beta=third, alpha=fifth)
        value = torch.addmm(value, polynomial, value, beta=first)
    return (value.T if tall else value).contiguous()
