"""The one form of a training checkpoint's tensors, whatever engine trained them and however they were spread.

    rank-00000.safetensors ...   one file per rank, with the rectangles ("pieces") of tensors that the rank owns
    index.json                   which rectangle of which tensor lies in which file

Any number of ranks, spread in any way, reads any rectangle back. Names are flat: "model.<parameter>",
"exp_avg.<parameter>", or another state of the optimizer. A tensor's only piece in a file goes by the tensor's name
there; of several, each by the name and where it starts: "model.output.weight@512,0".

Writing takes no memory beside the tensors, reading none beside what is asked for.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pipeline.errors import UserError
from pipeline.files import atomic_file
from pipeline.formats.tensor_file import DTYPE_NAMES, DTYPES, DamagedFileError, Layout, TensorFile, write_tensors

INDEX = "index.json"
_VERSION = 1
_OPEN_FILES = 128
"""ShardFile files that a reader keeps open; systems allow 1,024 or more in all."""


@dataclass(frozen=True)
class TensorShard:
    """A rectangle of a tensor: `tensor` covers [offset, offset + tensor.shape) of the global `shape`.

    The tensor is contiguous and in host memory. Raises ValueError if it does not fit.
    """

    tensor: Tensor
    offset: tuple[int, ...]
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        _check_inside(self.shape, self.offset, self.tensor.shape)


@dataclass(frozen=True)
class ShardFile:
    """What the index needs to know of one written file; small, and can be pickled.

    record: path, bytes, sha256. entries: by tensor name, the pieces in the file as {dtype, shape, offset, size}.
    """

    record: dict[str, Any]
    entries: dict[str, list[dict[str, Any]]]


def _check_inside(shape: Sequence[int], offset: Sequence[int], size: Sequence[int]) -> None:
    if len({len(shape), len(offset), len(size)}) > 1 or not all(
            start >= 0 and start + count <= end for start, count, end in zip(offset, size, shape, strict=True)):
        raise ValueError(f"A rectangle {tuple(size)} at {tuple(offset)} does not lie in {tuple(shape)}.")


def whole(tensor: Tensor) -> TensorShard:
    """All of a tensor as one piece."""
    return TensorShard(tensor, (0,) * tensor.dim(), tuple(tensor.shape))


def rectangles(shape: Sequence[int], start: int, stop: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
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


def write_part(path: Path, pieces: Mapping[str, TensorShard | Sequence[TensorShard]]) -> ShardFile:
    """Write what one rank owns as one safetensors file, hashed on the way and fsynced.

    Pieces without elements are left out. A rank may own nothing; its file is written all the same.

    Raises:
        OSError: the disk is full, or does not work; the file is left as far as it came.
        ValueError: a tensor is not contiguous or not in host memory.
    """
    entries: dict[str, list[dict[str, Any]]] = {}
    tensors: dict[str, Tensor] = {}
    for name, value in pieces.items():
        found = [value] if isinstance(value, TensorShard) else list(value)
        for piece in (piece for piece in found if piece.tensor.numel() or not math.prod(piece.shape)):
            tensors[name if len(found) == 1 else _key(name, piece.offset)] = piece.tensor
            entries.setdefault(name, []).append({
                "dtype": DTYPE_NAMES[piece.tensor.dtype], "shape": list(piece.shape), "offset": list(piece.offset),
                "size": list(piece.tensor.shape)})
    # Wide elements first: then each tensor starts at a multiple of its element size.
    tensors = dict(sorted(tensors.items(), key=lambda pair: -pair[1].dtype.itemsize))
    layouts = {key: Layout(tensor.dtype, tuple(tensor.shape)) for key, tensor in tensors.items()}
    return ShardFile(write_tensors(path, layouts, tensors.values()), entries)


def write_index(folder: Path, parts: Sequence[ShardFile]) -> dict[str, Any]:
    """Write index.json over all parts, atomically; returns its record (path, bytes, sha256).

    Raises:
        ValueError: the pieces do not cover each tensor exactly once, or disagree on what it is. An engine that
            hands out its state wrongly does that; nothing is written.
    """
    tensors: dict[str, dict[str, Any]] = {}
    for number, part in enumerate(parts):
        for name, entries in part.entries.items():
            for entry in entries:
                tensor = tensors.setdefault(name, {"dtype": entry["dtype"], "shape": entry["shape"], "pieces": []})
                if (tensor["dtype"], tensor["shape"]) != (entry["dtype"], entry["shape"]):
                    raise ValueError(f"{name} is {tensor['dtype']} {tensor['shape']} in one part, "
                                     f"{entry['dtype']} {entry['shape']} in {part.record['path']}.")
                tensor["pieces"].append([number, entry["offset"], entry["size"]])
    for name, tensor in tensors.items():
        _check_cover(name, tensor["shape"], [(offset, size) for _, offset, size in tensor["pieces"]])
    content = {"version": _VERSION, "files": [part.record["path"] for part in parts], "tensors": tensors}
    data = json.dumps(content, separators=(",", ":")).encode()
    with atomic_file(folder / INDEX) as file:
        file.write(data)
    return {"path": INDEX, "bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}


def _key(name: str, offset: Sequence[int]) -> str:
    return f"{name}@{','.join(map(str, offset))}"


def _check_cover(name: str, shape: Sequence[int], pieces: Sequence[tuple[Sequence[int], Sequence[int]]]) -> None:
    """Raise ValueError unless every element lies in exactly one piece.

    The edges of all pieces cut the tensor into a grid; a difference array over its cells counts the pieces on each,
    in time that grows with pieces and cells instead of with pairs of pieces.
    """
    low = np.array([offset for offset, _ in pieces], dtype=np.int64).reshape(len(pieces), len(shape))
    high = low + np.array([size for _, size in pieces], dtype=np.int64).reshape(low.shape)
    edges = [np.unique(np.concatenate([[0, size], low[:, axis], high[:, axis]])) for axis, size in enumerate(shape)]
    counts = np.zeros([len(edge) for edge in edges], dtype=np.int64)
    cells = [[np.searchsorted(edge, ends[:, axis]) for ends in (low, high)] for axis, edge in enumerate(edges)]
    for corner in itertools.product((0, 1), repeat=len(shape)):
        where = tuple(cells[axis][end] for axis, end in enumerate(corner))
        np.add.at(counts, where, (-1) ** sum(corner) * (1 if shape else len(pieces)))
    for axis in range(len(shape)):
        counts = counts.cumsum(axis=axis)
    inside = counts[tuple(slice(0, -1) for _ in shape)]
    wrong = np.argwhere(inside != 1)
    if len(wrong):
        cell = tuple(wrong[0])
        at = [int(edge[index]) for edge, index in zip(edges, cell, strict=True)]
        raise ValueError(f"The pieces of {name} {list(shape)} do not cover it exactly once: the element at {at} lies "
                         f"in {int(inside[cell])} of {len(pieces)}.")


def read_index(folder: Path) -> bytes:
    """The content of a checkpoint's index; nothing where it cannot be read, which a reader then tells."""
    try:
        return (folder / INDEX).read_bytes()
    except OSError:
        return b""


class CheckpointReader:
    """Reads rectangles of the tensors of a checkpoint's folder, from whatever pieces they lie in.

    Close it, or use it in a `with`. One thread at a time. `mend` says what helps against damage. `index`: what
    `read_index` gave somebody who read it for all.

    Raises:
        UserError: the index or a part is missing, torn or too short: now, or when something of it is read.
        KeyError: a tensor that the checkpoint does not have.
    """

    def __init__(self, folder: Path, mend: str = "Run the train stage again: it continues from the newest sound one.",
                 index: bytes | None = None) -> None:
        self.folder, self._mend = folder, mend
        self._open: OrderedDict[int, TensorFile] = OrderedDict()
        try:
            content = json.loads((folder / INDEX).read_bytes() if index is None else index)
            self._files: list[str] = content["files"]
            self._tensors: dict[str, dict[str, Any]] = content["tensors"]
            version = content["version"]
            if any(Path(name).name != name for name in self._files):
                raise ValueError("it names a file that is not beside it")
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise self._problem(f"{INDEX} is missing or torn ({error})") from error
        if version != _VERSION:
            raise UserError(f"The checkpoint {folder} has form {version}, and this Drover reads form {_VERSION}. Use "
                            f"the version of Drover that wrote it.")

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

    def shape(self, name: str) -> tuple[int, ...]:
        """The whole tensor's shape."""
        return tuple(self._tensors[name]["shape"])

    def dtype(self, name: str) -> torch.dtype:
        """The element type it is stored in."""
        return DTYPES[self._tensors[name]["dtype"]]

    def read(self, name: str, offset: Sequence[int] | None = None, shape: Sequence[int] | None = None,
             out: Tensor | None = None) -> Tensor:
        """The rectangle of tensor `name` that starts at `offset` (default: the beginning).

        shape: of the rectangle; by default that of `out`, or else up to the tensor's end. out: filled and returned,
        instead of a new tensor on the host; it may be strided, on any device, and of another element type.
        Raises ValueError if the rectangle is not inside the tensor, or `out` has another shape.
        """
        all_of_it = self.shape(name)
        offset = tuple(offset or (0,) * len(all_of_it))
        if shape is None:
            shape = out.shape if out is not None else [end - start for start, end
                                                       in zip(offset, all_of_it, strict=True)]
        target = torch.empty(tuple(shape), dtype=self.dtype(name)) if out is None else out
        if tuple(target.shape) != tuple(shape):
            raise ValueError(f"out is {tuple(target.shape)}, and {tuple(shape)} of {name} are to be read.")
        _check_inside(all_of_it, offset, target.shape)
        with torch.no_grad():
            for number, at, size in self._tensors[name]["pieces"]:
                low = [max(a, b) for a, b in zip(offset, at, strict=True)]
                high = [min(a + m, b + n) for a, m, b, n in zip(offset, target.shape, at, size, strict=True)]
                if all(start < end for start, end in zip(low, high, strict=True)):
                    self._copy(target[tuple(slice(start - a, end - a) for start, end, a
                                            in zip(low, high, offset, strict=True))],
                               number, name, at, size, tuple(start - b for start, b in zip(low, at, strict=True)))
        return target

    def _copy(self, target: Tensor, number: int, name: str, at: list[int], size: list[int],
              inside: tuple[int, ...]) -> None:
        """Fill `target` from place `inside` of the piece at `at` in part `number`."""
        try:
            file = self._file(number)
            key = name if name in file.layouts else _key(name, at)
            if file.layouts.get(key) != Layout(self.dtype(name), tuple(size)):
                raise DamagedFileError(f"{file.path} does not hold {list(size)} of {name}, as {INDEX} says")
            file.read_into(target, key, inside)
        except DamagedFileError as error:
            raise self._problem(str(error)) from error

    def _file(self, number: int) -> TensorFile:
        if number not in self._open:
            if len(self._open) >= _OPEN_FILES:
                self._open.popitem(last=False)[1].close()
            self._open[number] = TensorFile(self.folder / self._files[number])
        self._open.move_to_end(number)
        return self._open[number]

    def _problem(self, what: str) -> UserError:
        return UserError(f"The checkpoint {self.folder} cannot be read: {what}. {self._mend}")
