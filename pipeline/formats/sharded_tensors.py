"""The format of a training checkpoint's tensors, the same for every engine and layout.

    rank-00000.safetensors ...   one file per rank, with the rectangles ("pieces") of tensors that the rank owns
    index.json                   which rectangle of which tensor is in which file

Any number of ranks, in any layout, can read any rectangle. Names are flat: "model.<parameter>", "exp_avg.<parameter>",
or another optimizer state. In a file, a tensor's only piece has the tensor's name. If there are several, each has the
name and its offset: "model.output.weight@512,0". Tensors of one shape are usually cut in the same way, so tensors with
the same pieces share one list of them in the index: a cut. The number of cuts depends on the network only. So an index
grows with tensors and with ranks, not with their product. Indexes of neighbouring files are joined into one for all
files, in any number of steps.

Writing needs no memory besides the tensors, reading none besides the result.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated, TypedDict

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from drover.pipeline.core.errors import UserError
from drover.pipeline.core.files import Count, Inside, Output, atomic_file, parsed_json, read_bytes, typed
from drover.pipeline.formats.tensor_file import (
    DTYPE_NAMES,
    DTYPES,
    DamagedFileError,
    Dims,
    FileLayout,
    MaybeDims,
    Rectangle,
    TensorFile,
    overlap,
    rectangle_in,
    write_tensors,
)

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

    files: tuple[Output, ...]
    tensors: dict[str, Entry]
    cuts: tuple[Cut, ...]

    @classmethod
    def of(cls, file: Output, tensors: Mapping[str, tuple[str, Dims, Sequence[Rectangle]]]) -> Index:
        """The index of one file. tensors: element type, shape and rectangles of each."""
        cuts = dict[tuple[Rectangle, ...], int]()
        entries = dict[str, Entry]()
        for name, (dtype, shape, pieces) in tensors.items():
            entries[name] = Entry(dtype, shape, cuts.setdefault(tuple(pieces), len(cuts)))
        return cls((file,), entries, tuple(np.array([(0, *offset, *size) for offset, size in cut], np.int64)
                                           for cut in cuts))

    @classmethod
    def joined(cls, parts: Iterable[Index]) -> Index:
        """The index of all files of all parts, in order."""
        files = list[Output]()
        moved = list[list[Cut]]()
        result: dict[str, tuple[str, Dims, list[tuple[int, int]]]] = {}
        for number, part in enumerate(parts):
            for name, entry in part.tensors.items():
                dtype, shape, held = result.setdefault(name, (entry.dtype, entry.shape, []))
                assert (dtype, shape) == (entry.dtype, entry.shape), f"ranks disagree on what {name} is"
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


INDEX = "index.json"
_VERSION = 4
"""Version of the index."""
_OPEN_FILES = 128
"""Files that a reader keeps open; systems allow 1,024 or more in all."""


@dataclass(frozen=True)
class TensorShard:
    """A rectangle of a tensor: `tensor` covers [offset, offset + tensor.shape) of the global `shape`.

    The tensor is contiguous and in host memory. Raises ValueError if it does not fit.
    """

    tensor: Tensor
    offset: Dims
    shape: Dims

    def __post_init__(self) -> None:
        rectangle_in(self.shape, self.offset, self.tensor.shape)


Pieces = dict[str, list[TensorShard]]
"""The pieces of tensors that one rank holds, by the tensor's name."""


def write_part(path: Path, pieces: Pieces) -> Index:
    """Write the pieces of one rank to a safetensors file, hash it on the way and fsync it. Returns the file's index.

    Pieces without elements are left out. The file is also written if a rank owns nothing.

    Raises:
        OSError: the disk is full or fails; the file is left incomplete.
        ValueError: a tensor is not contiguous or not in host memory.
    """
    entries = dict[str, tuple[str, Dims, list[Rectangle]]]()
    tensors: dict[str, Tensor] = {}
    for name, result in pieces.items():
        kept = [piece for piece in result if piece.tensor.numel() or not math.prod(piece.shape)]
        for piece in kept:
            tensors[name if len(result) == 1 else _key(name, piece.offset)] = piece.tensor
        if kept:
            entries[name] = _entry(kept)
    # Wide elements first: then each tensor starts at a multiple of its element size.
    tensors = dict(sorted(tensors.items(), key=lambda pair: -pair[1].dtype.itemsize))
    layouts = {key: FileLayout(tensor.dtype, tuple(tensor.shape)) for key, tensor in tensors.items()}
    return Index.of(write_tensors(path, layouts, tensors.values()), entries)


def _entry(pieces: Sequence[TensorShard]) -> tuple[str, Dims, list[Rectangle]]:
    (dtype, shape), = {(piece.tensor.dtype, tuple(piece.shape)) for piece in pieces}
    return DTYPE_NAMES[dtype], shape, [(tuple(piece.offset), tuple(piece.tensor.shape)) for piece in pieces]


def write_index(folder: Path, index: Index) -> Output:
    """Write index.json over all files, atomically; returns its record (path, bytes, sha256).

    Raises:
        ValueError: the pieces do not cover each tensor exactly once, by a defect of an engine. Nothing is written.
    """
    index.check()
    content = {"version": _VERSION, "files": [record["path"] for record in index.files],
               "tensors": {name: asdict(entry) for name, entry in index.tensors.items()},
               "cuts": [cut.tolist() for cut in index.cuts]}
    data = json.dumps(content, separators=(",", ":")).encode()
    with atomic_file(folder / INDEX) as file:
        file.write(data)
    return {"path": INDEX, "bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}


def _key(name: str, offset: Sequence[int]) -> str:
    return f"{name}@{','.join(map(str, offset))}"


def read_index(folder: Path) -> bytes | None:
    """The content of a checkpoint's index; None if it cannot be read: a reader then raises the error."""
    try:
        return read_bytes(folder / INDEX)
    except OSError:
        return None


class _Content(TypedDict):
    version: int
    files: list[Inside]
    tensors: dict[str, Entry]
    cuts: list[list[tuple[Count, ...]]]


class CheckpointReader:
    """Reads rectangles of the tensors in a checkpoint's folder, from any pieces.

    Close it, or use it in a `with`. It is for one thread at a time.

    Args:
        index: content of the index, if `read_index` has read it for all ranks.

    Raises:
        UserError: the index or a part is missing, truncated or too short: now, or when it is read.
        KeyError: the checkpoint does not have the tensor.
    """

    def __init__(self, folder: Path, index: bytes | None = None) -> None:
        self.folder = folder
        self._open: OrderedDict[int, TensorFile] = OrderedDict()
        try:
            content = parsed_json(read_bytes(folder / INDEX) if index is None else index)
            if content["version"] != _VERSION:
                raise ValueError(f"another version of Drover wrote it: its form is not {_VERSION}")
            content = typed(content, _Content)
            self._files, self._tensors = content["files"], content["tensors"]
            self._cuts: list[Cut] = [np.array(pieces, np.int64) for pieces in content["cuts"]]
            for entry in self._tensors.values():
                corners(self._cuts[entry.cut], len(entry.shape))
            if any(Path(name).name != name for name in self._files):
                raise ValueError("it names a file in another folder")
        except (OSError, ValueError, LookupError, TypeError, OverflowError) as error:
            raise self._problem(f"{INDEX} is missing or damaged ({error})") from error

    def close(self) -> None:
        """Close the files."""
        while self._open:
            self._open.popitem()[1].close()

    def __enter__(self) -> CheckpointReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def names(self, prefix: str = "") -> list[str]:
        """The full names of all tensors that start with `prefix`, in the order in which they were written."""
        return [name for name in self._tensors if name.startswith(prefix)]

    def shape(self, name: str) -> Dims:
        """The whole tensor's shape."""
        return self._tensors[name].shape

    def dtype(self, name: str) -> torch.dtype:
        """The stored element type."""
        return DTYPES[self._tensors[name].dtype]

    def read(self, name: str, offset: MaybeDims = None, shape: MaybeDims = None) -> Tensor:
        """The rectangle of tensor `name` that starts at `offset` (default: the beginning) and has `shape` (default: up
        to the tensor's end), on the host. Raises ValueError if it is not inside the tensor."""
        offset, size = rectangle_in(self.shape(name), offset, shape)
        target = torch.empty(size, dtype=self.dtype(name))
        for number, (at, held) in overlapping(self._cuts[self._tensors[name].cut], offset, size):
            place, inside = overlap(offset, size, at, held)
            self._copy(target[place], number, name, at, held, inside)
        return target

    def _copy(self, target: Tensor, number: int, name: str, at: Sequence[int], size: Sequence[int],
              inside: Dims) -> None:
        """Fill `target` from the piece at `at` in file `number`, starting at `inside`."""
        try:
            file = self._file(number)
            key = name if name in file.layouts else _key(name, at)
            if file.layouts.get(key) != FileLayout(self.dtype(name), tuple(size)):
                raise DamagedFileError(f"{file.path} does not have {list(size)} of {name}, as {INDEX} states")
            file.read_into(target, key, inside)
        except DamagedFileError as error:
            raise self._problem(str(error)) from error

    def _file(self, number: int) -> TensorFile:
        if number not in self._open:
            if not 0 <= number < len(self._files):
                raise DamagedFileError(f"{INDEX} refers to the file {number} of {len(self._files)}")
            if len(self._open) >= _OPEN_FILES:
                self._open.popitem(last=False)[1].close()
            self._open[number] = TensorFile(self.folder / self._files[number])
        self._open.move_to_end(number)
        return self._open[number]

    def _problem(self, what: str) -> UserError:
        return UserError(f"The checkpoint {self.folder} cannot be read: {what}. Run the train stage again: "
                         f"it continues from the newest valid one.")
