"""Which rectangle of which tensor lies in which file, in words whose number does not grow with tensors times ranks.

What ranks own of a tensor is most often cut evenly: equal pieces at equal distances, in files at equal distances. Such
pieces are one `Run`, however many they are, and runs that repeat are one again, as where tensor parallelism and FSDP2
both cut. What a rank owns of a tensor that lies flat, as it does for rows and for ZeRO's ranges, is said by place and
length in it. Indexes of neighbouring files are joined into one of all, in any number of steps.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

import numpy as np

from drover.pipeline.files import Count
from drover.pipeline.formats.tensor_file import DTYPES

MOST_PIECES = 1 << 24
"""Of a tensor in one run."""
Rectangle = tuple[tuple[int, ...], tuple[int, ...]]
"""Offset and size."""
Step = tuple[int, int, tuple[int, ...]]
"""How many, and from one to the next: the distance in files, the distance in the tensor."""


@dataclass(frozen=True)
class Run:
    """Pieces at equal distances; without steps, one.

    file: number of the file of the first. offset, size: of the first and of all, by dimension; of one dimension where
    the tensor has another number of them, elements of the tensor laid out flat. steps: the nearest first.
    """

    file: Count
    offset: tuple[Count, ...]
    size: tuple[Count, ...]
    steps: tuple[Step, ...] = ()

    def after(self, files: int) -> Run:
        """The same, with so many files before."""
        return replace(self, file=self.file + files)

    def expanded(self) -> tuple[np.ndarray, np.ndarray]:
        """(pieces,) numbers of files and (pieces, dimensions) offsets."""
        files = np.array([self.file], dtype=np.int64)
        offsets = np.array(self.offset, dtype=np.int64).reshape(1, -1)
        for count, file_step, step in self.steps:
            many = np.arange(count, dtype=np.int64)
            files = (many[:, None] * file_step + files).reshape(-1)
            offsets = (many[:, None, None] * np.array(step, dtype=np.int64) + offsets).reshape(-1, len(self.offset))
        return files, offsets

    def is_flat(self, shape: Sequence[int]) -> bool:
        """Whether it speaks of the tensor laid out flat."""
        return len(self.offset) == 1 and len(shape) > 0


def _is_dtype(name: str) -> None:
    if name not in DTYPES:
        raise ValueError(f"{name[:20]!r} is no element type")


@dataclass(frozen=True)
class Entry:
    """A tensor: the name of its element type, its shape, and its pieces in the order of their files."""

    dtype: Annotated[str, _is_dtype]
    shape: tuple[Count, ...]
    runs: tuple[Run, ...]


def check_entry(entry: Entry) -> None:
    """ValueError unless pieces are rectangles of the tensor, or ranges of it laid out flat."""
    for run in entry.runs:
        if {len(run.offset), len(run.size), *(len(distance) for _, _, distance in run.steps)} not in (
                {1}, {len(entry.shape)}) or math.prod(count for count, _, _ in run.steps) > MOST_PIECES:
            raise ValueError(f"{str(run)[:100]} are no pieces of a tensor of {list(entry.shape)}")


@dataclass(frozen=True)
class Index:
    """What lies in some files. files: their records (path, bytes, sha256). tensors: by name."""

    files: tuple[dict[str, Any], ...] = ()
    tensors: dict[str, Entry] = field(default_factory=dict)

    @classmethod
    def joined(cls, parts: Iterable[Index]) -> Index:
        """Of all files of all parts, in order.

        Raises:
            ValueError: the parts disagree on what a tensor is.
        """
        files: list[dict[str, Any]] = []
        found: dict[str, tuple[str, tuple[int, ...], list[Run]]] = {}
        for part in parts:
            for name, entry in part.tensors.items():
                dtype, shape, runs = found.setdefault(name, (entry.dtype, entry.shape, []))
                if (dtype, shape) != (entry.dtype, entry.shape):
                    raise ValueError(f"{name} is {dtype} {list(shape)} in one part, {entry.dtype} {list(entry.shape)} "
                                     f"in {part.files[entry.runs[0].file]['path']}.")
                for run in entry.runs:
                    append(runs, run.after(len(files)))
            files += part.files
        return cls(tuple(files), {name: Entry(dtype, shape, tuple(runs)) for name, (dtype, shape, runs)
                                  in found.items()})


def append(runs: list[Run], run: Run) -> None:
    """Put `run` behind those that are there, in as few runs as that gives."""
    while runs and (joined := _joined(runs[-1], run)) is not None:
        runs.pop()
        run = joined
    runs.append(run)


def _joined(a: Run, b: Run) -> Run | None:
    """One run of both, `a` first, if there is one."""
    if a.size != b.size or len(a.offset) != len(b.offset):
        return None
    files = b.file - a.file
    distance = tuple(second - first for first, second in zip(a.offset, b.offset, strict=True))
    inner_a, inner_b = a.steps[:-1], b.steps[:-1]
    if a.steps and (inner_a == b.steps or (inner_a == inner_b and a.steps[-1][1:] == b.steps[-1][1:])):
        count, file_step, step = a.steps[-1]
        if files == count * file_step and distance == tuple(count * length for length in step):
            more = 1 if inner_a == b.steps else b.steps[-1][0]
            return replace(a, steps=(*inner_a, (count + more, file_step, step)))
    if b.steps and inner_b == a.steps:
        count, file_step, step = b.steps[-1]
        if (files, distance) == (file_step, step):
            return replace(a, steps=(*inner_b, (count + 1, file_step, step)))
    # Only forwards: across the end of a row of pieces there is a distance too, but none that repeats.
    if a.steps == b.steps and files > 0 and any(distance) and min(distance) >= 0:
        return replace(a, steps=(*a.steps, (2, files, distance)))
    return None


def run_of(file: int, shape: Sequence[int], rectangles_of_it: Sequence[Rectangle]) -> list[Run]:
    """What a file holds of a tensor: a flat range, if its rectangles are one, or each rectangle."""
    if shape and rectangles_of_it:
        strides = [math.prod(shape[axis + 1:]) for axis in range(len(shape))]
        start = sum(at * stride for at, stride in zip(rectangles_of_it[0][0], strides, strict=True))
        count = sum(math.prod(size) for _, size in rectangles_of_it)
        if count and list(rectangles(shape, start, start + count)) == list(rectangles_of_it):
            return [Run(file, (start,), (count,))]
    return [Run(file, offset, size) for offset, size in rectangles_of_it]


def rectangles(shape: Sequence[int], start: int, stop: int) -> Iterator[Rectangle]:
    """Elements [start, stop) of a tensor laid out flat, as (offset, size) of rectangles, in their flat order.

    For engines that cut tensors without regard to rows: the elements of the first rectangle come first in the flat
    range, and so on. A matrix gives at most three: the end of a row, whole rows, the beginning of a row.
    """
    if start >= stop:
        return
    if not shape:
        yield (), ()
        return
    inner = math.prod(shape[1:])
    first, last = -(-start // inner), stop // inner  # whole rows
    if first > last:  # inside one row
        first = last = stop // inner
        yield from (((last, *offset), (1, *size)) for offset, size
                    in rectangles(shape[1:], start - last * inner, stop - last * inner))
        return
    yield from (((first - 1, *offset), (1, *size)) for offset, size
                in rectangles(shape[1:], start - (first - 1) * inner, inner) if start < first * inner)
    if first < last:
        yield (first, *(0,) * (len(shape) - 1)), (last - first, *shape[1:])
    yield from (((last, *offset), (1, *size)) for offset, size in rectangles(shape[1:], 0, stop - last * inner))


def overlapping(entry: Entry, offset: Sequence[int], size: Sequence[int]) -> Iterator[tuple[int, Rectangle]]:
    """(number of its file, rectangle) of all pieces that may have something of the rectangle at `offset`.

    Some have nothing of it. Takes no longer than there are pieces, and in Python no longer than there are such ones.
    """
    if not all(size):
        return
    low, high = np.array(offset, dtype=np.int64), np.array(offset, dtype=np.int64) + np.array(size, dtype=np.int64)
    for run in entry.runs:
        files, starts = run.expanded()
        flat = run.is_flat(entry.shape)
        first, end = (low, high) if not flat else (
            np.array([np.ravel_multi_index(corner, entry.shape)]) for corner in (tuple(low), tuple(high - 1)))
        hit = ((starts < end + flat) & (starts + np.array(run.size, dtype=np.int64) > first)).all(axis=1)
        for file, start in zip(files[hit].tolist(), starts[hit].tolist(), strict=True):
            if flat:
                yield from ((file, found) for found in rectangles(entry.shape, start[0], start[0] + run.size[0]))
            else:
                yield file, (tuple(start), run.size)


def check_cover(name: str, entry: Entry) -> None:
    """Raise ValueError unless every element of a tensor lies in exactly one piece."""
    if entry.shape and all(run.is_flat(entry.shape) for run in entry.runs):
        starts = np.concatenate([run.expanded()[1][:, 0] for run in entry.runs])
        stops = np.concatenate([run.expanded()[1][:, 0] + run.size[0] for run in entry.runs])
        order = np.argsort(starts, kind="stable")
        edges = np.concatenate([[0], stops[order]])
        if edges[-1] == math.prod(entry.shape) and (starts[order] == edges[:-1]).all():
            return
    lows, sizes = [], []
    for run in entry.runs:
        starts = run.expanded()[1]
        if run.is_flat(entry.shape) and len(entry.shape) > 1:
            found = [part for start, in starts.tolist() for part in rectangles(entry.shape, start, start + run.size[0])]
            lows += [np.array([low for low, _ in found])]
            sizes += [np.array([size for _, size in found])]
        else:
            lows += [starts]
            sizes += [np.broadcast_to(np.array(run.size, dtype=np.int64), starts.shape)]
    _check_grid(name, entry.shape, np.concatenate(lows), np.concatenate(sizes))


def _check_grid(name: str, shape: Sequence[int], low: np.ndarray, size: np.ndarray) -> None:
    """`check_cover` of any rectangles.

    The edges of all pieces cut the tensor into a grid; a difference array over its cells counts the pieces on each,
    in time that grows with pieces and cells instead of with pairs of pieces.
    """
    high = low + size
    edges = [np.unique(np.concatenate([[0, length], low[:, axis], high[:, axis]])) for axis, length in enumerate(shape)]
    counts = np.zeros([len(edge) for edge in edges], dtype=np.int64)
    cells = [[np.searchsorted(edge, ends[:, axis]) for ends in (low, high)] for axis, edge in enumerate(edges)]
    for corner in itertools.product((0, 1), repeat=len(shape)):
        where = tuple(cells[axis][end] for axis, end in enumerate(corner))
        np.add.at(counts, where, (-1) ** sum(corner) * (1 if shape else len(low)))
    for axis in range(len(shape)):
        counts = counts.cumsum(axis=axis)
    inside = counts[tuple(slice(0, -1) for _ in shape)]
    wrong = np.argwhere(inside != 1)
    if len(wrong):
        cell = tuple(wrong[0])
        at = [int(edge[index]) for edge, index in zip(edges, cell, strict=True)]
        raise ValueError(f"The pieces of {name} {list(shape)} do not cover it exactly once: the element at {at} lies "
                         f"in {int(inside[cell])} of {len(low)}.")
