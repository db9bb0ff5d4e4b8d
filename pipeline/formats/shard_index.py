"""The index of a checkpoint: which rectangle of which tensor is in which file.

Tensors of one shape are usually cut in the same way, so tensors with the same pieces share one list of them: a cut. The
number of cuts depends on the network only. So an index grows with tensors and with ranks, not with their product.
Indexes of neighbouring files are joined into one for all files, in any number of steps.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated

import numpy as np
from numpy.typing import NDArray

from drover.pipeline.core.files import Count, Record
from drover.pipeline.formats.tensor_file import DTYPES, Dims, Rectangle

Cut = NDArray[np.int64]
"""(pieces, 1 + 2 dimensions), in the order of their files: a piece's file, by its number, its offset and its size."""


def _is_dtype(name: str) -> None:
    if name not in DTYPES:
        raise ValueError(f"{name[:20]!r} is no element type")


@dataclass(frozen=True)
class Entry:
    """A tensor: the name of its element type, its shape, and the number of its cut."""

    dtype: Annotated[str, _is_dtype]
    shape: tuple[Count, ...]
    cut: Count


@dataclass(frozen=True, eq=False)
class Index:
    """The content of some files. files: their records (path, bytes, sha256). tensors: by name."""

    files: tuple[Record, ...]
    tensors: dict[str, Entry]
    cuts: tuple[Cut, ...]

    @classmethod
    def of(cls, file: Record, tensors: Mapping[str, tuple[str, Dims, Sequence[Rectangle]]]) -> Index:
        """The index of one file. tensors: element type, shape and rectangles of each."""
        cuts = dict[tuple[Rectangle, ...], int]()
        entries = dict[str, Entry]()
        for name, (dtype, shape, pieces) in tensors.items():
            entries[name] = Entry(dtype, shape, cuts.setdefault(tuple(pieces), len(cuts)))
        return cls((file,), entries, tuple(np.array([(0, *offset, *size) for offset, size in cut], np.int64)
                                           for cut in cuts))

    @classmethod
    def joined(cls, parts: Iterable[Index]) -> Index:
        """The index of all files of all parts, in order.

        Raises:
            ValueError: the parts disagree on what a tensor is.
        """
        files = list[Record]()
        moved = list[list[Cut]]()
        result: dict[str, tuple[str, Dims, list[tuple[int, int]]]] = {}
        for number, part in enumerate(parts):
            for name, entry in part.tensors.items():
                dtype, shape, held = result.setdefault(name, (entry.dtype, entry.shape, []))
                if (dtype, shape) != (entry.dtype, entry.shape):
                    path = part.files[part.cuts[entry.cut][0, 0]]["path"]
                    raise ValueError(f"{name} is {dtype} {list(shape)} in one part, {entry.dtype} {list(entry.shape)} "
                                     f"in {path}.")
                held.append((number, entry.cut))
            moved.append([cut + np.eye(1, cut.shape[1], dtype=np.int64) * len(files) for cut in part.cuts])
            files += part.files
        cuts = dict[tuple[tuple[int, int], ...], int]()
        tensors = {name: Entry(dtype, shape, cuts.setdefault(tuple(held), len(cuts)))
                   for name, (dtype, shape, held) in result.items()}
        return cls(tuple(files), tensors, tuple(np.concatenate([moved[part][cut] for part, cut in held])
                                                for held in cuts))

    def check(self) -> None:
        """ValueError unless the pieces of each tensor have its dimensions and cover it exactly once."""
        seen = set[tuple[int, Dims]]()
        for name, entry in self.tensors.items():
            if (entry.cut, entry.shape) in seen:
                continue
            seen.add((entry.cut, entry.shape))
            low, size = corners(self.cuts[entry.cut], len(entry.shape))
            if (wrong := _wrong(entry.shape, low, low + size)) is not None:
                raise ValueError(f"The pieces of {name} {list(entry.shape)} do not cover it exactly once: the element "
                                 f"at {wrong[0]} lies in {wrong[1]} of {len(low)}.")


def corners(cut: Cut, dimensions: int) -> tuple[Cut, Cut]:
    """Offsets and sizes of pieces, (pieces, dimensions) each. ValueError for another number of dimensions."""
    if cut.ndim != 2 or cut.shape[1] != 1 + 2 * dimensions:
        raise ValueError(f"pieces of {dimensions} dimensions are {list(cut.shape)}")
    return cut[:, 1:1 + dimensions], cut[:, 1 + dimensions:]


def _wrong(shape: Sequence[int], low: Cut, high: Cut) -> tuple[list[int], int] | None:
    """An element of a tensor that is not in exactly one rectangle, and the number of rectangles that it is in."""
    if not shape:
        return None if len(low) == 1 else ([], len(low))
    for start, stop in pairwise(np.unique(np.concatenate([[0, shape[0]], low[:, 0], high[:, 0]])).tolist()):
        own = (low[:, 0] <= start) & (high[:, 0] >= stop)
        if (wrong := _wrong(shape[1:], low[own, 1:], high[own, 1:])) is not None:
            return [start, *wrong[0]], wrong[1]
    return None


def rectangles(shape: Sequence[int], start: int, stop: int) -> Iterator[Rectangle]:
    """Elements [start, stop) of a flattened tensor, as (offset, size) of rectangles, in the order of the elements.

    For engines that cut flattened tensors. A matrix gives at most three rectangles: the end of a row, complete rows,
    the beginning of a row.
    """
    if start >= stop:
        return
    if not shape:
        yield (), ()
        return
    inner = math.prod(shape[1:])
    first, last = -(-start // inner), stop // inner  # whole rows

    def of_row(row: int, begin: int, end: int) -> Iterator[Rectangle]:
        return (((row, *offset), (1, *size)) for offset, size in rectangles(shape[1:], begin, end))
    if first > last:  # inside one row
        yield from of_row(last, start - last * inner, stop - last * inner)
        return
    yield from of_row(first - 1, start - (first - 1) * inner, inner)
    if first < last:
        yield (first, *(0,) * (len(shape) - 1)), (last - first, *shape[1:])
    yield from of_row(last, 0, stop - last * inner)


def overlapping(cut: Cut, offset: Sequence[int], size: Sequence[int]) -> Iterator[tuple[int, Rectangle]]:
    """(number of its file, rectangle) of all pieces that overlap with the rectangle at `offset`."""
    low, sizes = corners(cut, len(offset))
    start = np.array(offset, np.int64)
    inside = np.minimum(low + sizes, start + np.array(size, np.int64)) > np.maximum(low, start)
    for file, *place in cut[inside.all(axis=1)].tolist():
        yield file, (tuple(place[:len(offset)]), tuple(place[len(offset):]))
