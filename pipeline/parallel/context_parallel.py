"""Context parallelism: a group of ranks shares each sequence, split by `plan`, and attends to all of it.

Each document is cut into 2 x ranks chunks. Rank i takes the i-th from the start (a head) and the i-th from the end (a
tail): together they have as much to look back on as those of any other rank (Grattafiori et al., 2024, section 3.3.2).
A chunk's queries see the document up to the chunk's end, so a rank attends to one segment of queries and keys for each
of its chunks.

Every layer but attention computes each token alone, so a rank computes its tokens as if there were no others. Attention
all-gathers keys and values over the group. With few kv heads they are small,
and any document mask works. The gathered keys are reordered so that the keys of each chunk's queries are contiguous. A
backend that supports segments attends to these exactly, without padding.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from drover.model.attention.backend import Backend, Documents, Keys, Where, moved
from drover.model.loss import wide
from drover.pipeline.data.sampling.batch import Batch


@dataclass(frozen=True)
class RowPlan:
    """How one row's tokens are distributed over the ranks.

    Attributes:
        edges: (documents, 2 x ranks + 1) int64, the position in the row at which each chunk of each document begins;
            the last is the document's end.
        places: (ranks, length / ranks) int32, the positions in the row of each rank's tokens, ascending.
    """

    edges: np.ndarray
    places: np.ndarray

    def segments(self, rank: int) -> np.ndarray:
        """(segments, 4) int64, a row for each chunk that has tokens on this rank, ascending: the positions of the
        document's begin and of the chunk's begin and end; then 1 for a tail, 0 for a head."""
        tail = self.edges.shape[1] - 2 - rank
        parts = [np.stack([self.edges[:, 0], self.edges[:, chunk], self.edges[:, chunk + 1],
                           np.full(len(self.edges), kind)], axis=1) for kind, chunk in enumerate((rank, tail))]
        both = np.stack(parts, axis=1).reshape(-1, 4)
        return both[both[:, 2] > both[:, 1]]


@lru_cache(maxsize=256)
def plan(lengths: tuple[int, ...], ranks: int) -> RowPlan:
    """The plan of a row whose documents have these lengths.

    The chunks of a document differ in length by at most one token. The remaining tokens go to the ranks in turn, first
    to heads, then to tails, and the next document continues the turn. So every rank has equally many tokens of the row,
    and about equal work, although a tail's token has more of it.

    Raises ValueError if `ranks` does not divide the row.
    """
    if sum(lengths) % ranks:
        raise ValueError(f"A row of {sum(lengths)} tokens cannot be split evenly over {ranks} ranks.")
    length, chunk = np.array(lengths, dtype=np.int64)[:, None], np.arange(2 * ranks)
    owners = np.minimum(chunk, chunk[::-1])
    over = length % len(chunk)
    turn = (owners + ranks * (chunk >= ranks) - (np.cumsum(over)[:, None] - over)) % len(chunk)
    sizes = length // len(chunk) + (turn < over)
    begins = np.cumsum(length)[:, None] - length
    edges = np.concatenate([begins, begins + np.cumsum(sizes, axis=1)], axis=1)
    owner = np.repeat(np.tile(owners, len(lengths)), sizes.ravel())  # of each token
    places = np.argsort(owner, kind="stable").astype(np.int32)  # 256 plans of long rows are held
    return RowPlan(edges, places.reshape(ranks, -1))


GATHER = torch.ops._c10d_functional.all_gather_into_tensor
SCATTER = torch.ops._c10d_functional.reduce_scatter_tensor
WAIT = torch.ops._c10d_functional.wait_tensor
"""Collectives that torch.compile can trace."""

STEPS = 8
"""Rows of gathered keys are rounded up to this fraction of the tokens: few sizes for the allocator to hold."""


def part_of(batch: Batch, ranks: int, rank: int, across_documents: bool = False) -> Batch:
    """A rank's part of each sequence: (sequences, length / ranks) tensors. Lengths and targets stay those of the whole
    sequences.

    across_documents: a sequence counts as one document.
    """
    if across_documents:
        rows, length = batch.tokens.shape
        place = torch.arange(length).expand(rows, length)
        batch = Batch(batch.tokens, batch.labels, torch.zeros_like(batch.documents), place, batch.targets,
                      ((length,),) * rows, batch.padding)
    index = places(batch.lengths, ranks)[:, rank]
    tokens, labels, documents, positions = (
        tensor.gather(1, index) for tensor in (batch.tokens, batch.labels, batch.documents, batch.positions))
    return Batch(tokens, labels, documents, positions, batch.targets, batch.lengths, batch.padding)


def places(lengths: tuple[tuple[int, ...], ...], ranks: int) -> Tensor:
    """Each rank's token positions in each row: (rows, ranks, length / ranks) int64."""
    return torch.from_numpy(np.stack([plan(row, ranks).places for row in lengths])).long()


@dataclass(frozen=True)
class Gathered:
    """How one rank finds its keys in a micro-batch of which it holds (rows, length / ranks) tokens.

    Gathered keys are in the order of ranks, then rows. Packed keys are in the order of segments.

    Attributes:
        lengths: queries of each segment.
        keys: keys of each segment.
        index: (keys.rows,) int64, the place of each packed key among the gathered ones; any place for padding.
        uses: (2, gathered) int64, the place of each gathered key among the packed ones: in a segment of a head, and in
            a segment of a tail. -1 where it is in none.
    """

    lengths: tuple[int, ...]
    keys: Keys
    index: np.ndarray
    uses: np.ndarray


@lru_cache(maxsize=8)  # each stage of a pipeline asks
def gathered(lengths: tuple[tuple[int, ...], ...], ranks: int, rank: int) -> Gathered:
    """The keys that `rank` needs for rows with documents of these lengths."""
    length = sum(lengths[0])
    own = length // ranks  # tokens of a row on each rank
    sizes, packed, tails = [], [], []
    for row, documents in enumerate(lengths):
        result = plan(documents, ranks)
        place = np.empty(length, dtype=np.int64)  # of each token of the row, among the gathered
        place[result.places] = (np.arange(ranks)[:, None] * len(lengths) + row) * own + np.arange(own)
        first, begin, end, tail = result.segments(rank).T
        seen = end - first
        # Each segment's keys are neighbours in the row: first, first + 1, ... of each, one after the other.
        behind = np.repeat(np.cumsum(seen) - seen, seen)
        packed.append(place[np.repeat(first, seen) + np.arange(int(seen.sum())) - behind])
        tails.append(np.repeat(tail, seen))
        sizes.append(np.stack([end - begin, seen], axis=1))
    index, tail_of, size = (np.concatenate(parts) for parts in (packed, tails, sizes))
    uses = np.full((2, ranks * len(lengths) * own), -1, dtype=np.int64)
    uses[tail_of, index] = np.arange(len(index))
    step = -(-length * len(lengths) // STEPS)
    rows = -(-len(index) // step) * step
    return Gathered(tuple(size[:, 0].tolist()), Keys(tuple(size[:, 1].tolist()), rows),
                    np.pad(index, (0, rows - len(index))), uses)


class Prepared(NamedTuple):
    """The tensors of `Gathered` on the device, and what the inner backend prepared for its segments."""

    places: Tensor
    uses: Tensor
    inner: Any


class ContextParallel(Backend):
    """A backend for one rank's tokens. It exchanges keys and values, and leaves the computation to another backend.

    inner: computes segments. mesh: of the context group.
    """

    name = "context parallel"
    segments = True

    def __init__(self, inner: Backend, mesh: DeviceMesh) -> None:
        self.inner, self.operators = inner, inner.operators  # type: ignore[misc]  # these of an object, not of a class
        self.ranks, self.rank, self.group = mesh.size(), mesh.get_local_rank(), mesh.get_group().group_name

    def unsupported(self, where: Where) -> str:
        """See Backend."""
        return self.inner.unsupported(where)

    def prepare(self, documents: Documents, dtype: torch.dtype) -> Prepared:
        """See Backend. documents: numbers of this rank's tokens, lengths of the whole."""
        count, own = documents.numbers.shape
        assert documents.given is not None, "a part of a sequence does not show the lengths of its documents"
        rows = tuple(_rows(documents.given, own * self.ranks))
        assert len(rows) == count, f"{len(rows)} rows of documents for {count} rows of tokens"
        result, device = gathered(rows, self.ranks, self.rank), documents.numbers.device
        segments = Documents(documents.numbers.view(1, -1), result.lengths, result.keys)
        return Prepared(moved(torch.from_numpy(result.index), device), moved(torch.from_numpy(result.uses), device),
                        self.inner.prepare(segments, dtype))

    def offer(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """See Backend. Returns a stand-in for this rank's k and v, and those of all ranks, which are still in
        flight."""
        both = torch.stack((k.flatten(0, 1), v.flatten(0, 1)), dim=1)  # (tokens, 2, kv_heads, head_dim): one collective
        return _Own.apply(both), GATHER(both.detach(), self.ranks, self.group)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, prepared: Prepared) -> Tensor:
        """See Backend. k, v: from `offer`."""
        packed, uses, inner = prepared
        keys, values = _Packed.apply(k, v, packed, uses, self.ranks, self.group)
        return self.inner.attend(q.flatten(0, 1).unsqueeze(0), keys.unsqueeze(0), values.unsqueeze(0),
                                 inner).view(q.shape)


class _Own(torch.autograd.Function):
    """A stand-in for a rank's own keys and values. Its contents are meaningless. Its gradient has the same shape, is at
    least float32, and may still be in flight from other ranks.

    Autograd runs the latest operation first: `_Packed` starts the exchange, queries and their weights get their
    gradients, and only then does this function wait.
    """

    @staticmethod
    def forward(ctx: Any, both: Tensor) -> Tensor:
        ctx.dtype = both.dtype
        return torch.empty_like(both, dtype=wide(both.dtype))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return WAIT(gradient).to(ctx.dtype)


class _Packed(torch.autograd.Function):
    """Every rank's keys and values, packed. Backward, each rank gets the sum of all ranks' gradients of its own.

    The sum is at least float32 and needs no atomic additions: a key is in at most two segments of a rank.
    """

    @staticmethod
    def forward(ctx: Any, own: Tensor, gathered: Tensor, index: Tensor, uses: Tensor, ranks: int,
                group: str) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(uses)
        ctx.ranks, ctx.group = ranks, group
        gathered_all = WAIT(gathered)  # (gathered, 2, kv_heads, head_dim)
        return gathered_all[:, 0].index_select(0, index), gathered_all[:, 1].index_select(0, index)

    @staticmethod
    def backward(ctx: Any, keys: Tensor, values: Tensor) -> tuple[Tensor, None, None, None, None, None]:
        uses, = ctx.saved_tensors
        total = _sum((keys, values), uses)
        return SCATTER(total, "sum", ctx.ranks, ctx.group), None, None, None, None, None


def _sum(gradients: tuple[Tensor, ...], uses: Tensor) -> Tensor:
    """(gathered, len(gradients), kv_heads, head_dim) sums over both uses of each key, in float32 at least, of each
    (packed, kv_heads, head_dim)."""
    first = gradients[0]
    total = first.new_empty((uses.shape[1], len(gradients), *first.shape[1:]), dtype=wide(first.dtype))
    for packed, sums in zip(gradients, total.unbind(1), strict=True):
        for number, use in enumerate(uses.unbind()):
            # Selected, not multiplied by 0: padding rows may hold NaN.
            result = torch.where(use[:, None, None] < 0, 0, packed.index_select(0, use.clamp(min=0)))
            sums.copy_(result) if number == 0 else sums.add_(result)
    return total


def full_losses(model: Any, mesh: DeviceMesh, tokens: Tensor, labels: Tensor, documents: Tensor,
                 positions: Tensor) -> Tensor:
    """The nats of each target of whole sequences, (rows, length), on every rank of `mesh`'s group; no gradient. The
    arguments are Llama's and the same on all these ranks. Each rank computes its part."""
    rows = tuple(_rows(Documents(documents).lengths, tokens.shape[1]))
    index = places(rows, mesh.size()).to(tokens.device)
    mine = index[:, mesh.get_local_rank()]
    own = [tensor.gather(1, mine) for tensor in (tokens, labels, documents, positions)]
    nats: Tensor = model(*own[:2], documents=own[2], positions=own[3], reduction="none",
                         document_lengths=[length for row in rows for length in row])
    parts = [torch.empty_like(nats) for _ in range(mesh.size())]
    dist.all_gather(parts, nats.contiguous(), group=mesh.get_group())
    return torch.empty(tokens.shape, dtype=nats.dtype, device=nats.device).scatter_(
        1, index.flatten(1), torch.cat(parts, dim=1))


def _rows(lengths: Any, length: int) -> Iterator[tuple[int, ...]]:
    """Split the documents' lengths of all rows into those of each row of `length` tokens."""
    begin = 0
    for count, end in enumerate(accumulate(lengths), start=1):
        if end % length == 0:
            yield tuple(lengths[begin:count])
            begin = count
