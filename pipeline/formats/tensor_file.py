"""safetensors files, written here and read in parts.

The format (https://huggingface.co/docs/safetensors): 8 bytes with the length of the header, the header as JSON, the
tensors' bytes, little-endian and without gaps. The library safetensors can write only what is in memory as a whole, and
a hash needs a second reading. It reads through a memory map, so that a damaged disk ends the process instead of raising
an error. Here a tensor is written and hashed at a time, and read errors are raised.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict

import torch
from torch import Tensor

from drover.pipeline.core.files import (
    Count,
    Output,
    flush,
    named_in_errors,
    opened,
    parsed_json,
    typed,
)

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}
"""The format's names of element types."""
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}

Dims = tuple[int, ...]
"""A number for each dimension of a tensor: its shape, or the offset or size of a rectangle in it."""
Rectangle = tuple[Dims, Dims]
"""Offset and size."""
MaybeDims = Sequence[int] | None
"""Offset or size of a rectangle; None: the beginning, or up to the end."""

_CHUNK = 1 << 20
"""Bytes to hash and write at a time, so few that they are still in the cache when they are written."""
_BLOCK = 16 << 20
"""Bytes to read at a time if they cannot be read straight into the target."""
_RUN = 64 << 10
"""Smallest part of a row, in bytes, that is read without the rest of its row."""


class Header(TypedDict):
    """A tensor in the header of a file."""

    dtype: str
    shape: tuple[Count, ...]
    data_offsets: tuple[Count, Count]


class DamagedFileError(Exception):
    """A tensor file is missing, truncated, or has other content than it should."""


@dataclass(frozen=True)
class FileLayout:
    """Element type and shape of a tensor in a file."""

    dtype: torch.dtype
    shape: Dims

    @property
    def size(self) -> int:
        """Bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


def rectangle_in(full: Sequence[int], offset: MaybeDims, size: MaybeDims) -> Rectangle:
    """A rectangle of a tensor: offset (default: the beginning) and size (default: up to the end). ValueError if it is
    not inside."""
    start = tuple(offset or (0,) * len(full))
    if size is None and len(start) == len(full):
        size = [end - at for at, end in zip(start, full, strict=True)]
    if size is None or len({len(full), len(start), len(size)}) > 1 or not all(
            0 <= at <= at + count <= end for at, count, end in zip(start, size, full, strict=True)):
        raise ValueError(f"A rectangle {tuple(size or ())} at {start} does not lie in {tuple(full)}.")
    return start, tuple(size)


def overlap(offset: Sequence[int], size: Sequence[int], at: Sequence[int],
            held: Sequence[int]) -> tuple[tuple[slice, ...], Dims]:
    """The overlap of the rectangle at `offset` with the one at `at`, of size `held`: its slices in the first, and its
    offset in the second. It may be empty."""
    place, inside = list[slice](), list[int]()
    for start, length, begin, count in zip(offset, size, at, held, strict=True):
        low = max(start, begin)
        place.append(slice(low - start, max(low, min(start + length, begin + count)) - start))
        inside.append(low - begin)
    return tuple(place), tuple(inside)


def write_tensors(path: Path, layouts: Mapping[str, FileLayout], tensors: Iterable[Tensor]) -> Output:
    """Write a safetensors file. Returns its record: path (the name alone), bytes, sha256.

    `tensors` yields the contents in the order of `layouts`, contiguous and in host memory. They are taken one at a
    time, and not copied. The file is fsynced, but not its name in the folder (use `sync`). After an error it is left
    incomplete.

    Raises:
        OSError: the disk is full or fails.
        ValueError: a tensor does not match its layout.
    """
    digest = hashlib.sha256()
    size = 0
    with named_in_errors(path), open(path, "wb", buffering=0) as file:
        for content in _contents(layouts, tensors):
            for start in range(0, len(content), _CHUNK):
                chunk = content[start:start + _CHUNK]
                digest.update(chunk)
                size += len(chunk)
                while chunk:
                    chunk = chunk[file.write(chunk):]
        flush(file)
    return {"path": path.name, "bytes": size, "sha256": digest.hexdigest()}


def _contents(layouts: Mapping[str, FileLayout], tensors: Iterable[Tensor]) -> Iterator[memoryview]:
    """The bytes of a file, in order: the header, then the tensors."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, layout in layouts.items():
        header[name] = {"dtype": DTYPE_NAMES[layout.dtype], "shape": layout.shape,
                        "data_offsets": [end, end + layout.size]}
        end += layout.size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # so that the tensors start at a multiple of 8 bytes
    yield memoryview(len(text).to_bytes(8, "little") + text)
    for (name, layout), tensor in zip(layouts.items(), tensors, strict=True):
        if FileLayout(tensor.dtype, tuple(tensor.shape)) != layout or tensor.device.type != "cpu":
            raise ValueError(f"{name} should be {layout} in host memory; it is {tensor.dtype}, {tuple(tensor.shape)} "
                             f"on {tensor.device}.")
        yield _bytes(tensor)


def _bytes(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor on the host, with any element type (numpy has no bfloat16)."""
    if not tensor.is_contiguous():
        raise ValueError(f"The tensor {tuple(tensor.shape)} is not contiguous.")
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().data


class TensorFile:
    """A safetensors file, open for reading any rectangle of its tensors. Close it.

    Raises:
        DamagedFileError: now, if it is missing or its size does not match its header; later, if a read comes up short.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._file = opened(path, 0)
        except FileNotFoundError as error:
            raise DamagedFileError(f"{path} is missing") from error
        except OSError as error:
            raise DamagedFileError(f"{path} cannot be read ({error.strerror})") from error
        try:
            self.layouts, self._starts = self._read_header()
        except BaseException:
            self._file.close()
            raise

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def read_into(self, target: Tensor, name: str, offset: Dims) -> None:
        """Fill `target`, on the host and of the stored element type, with the rectangle of the tensor `name` that
        starts at `offset` and has target's shape. The target may be strided."""
        layout, start = self.layouts[name], self._starts[name]
        if not layout.shape:  # read a scalar as a row of one
            layout, target, offset = FileLayout(layout.dtype, (1,)), target.view(1), (0,)
        if target.numel():
            self._fill(target, layout, start, offset)

    def _fill(self, target: Tensor, layout: FileLayout, start: int, offset: Dims) -> None:
        first = offset[0]
        inner = FileLayout(layout.dtype, layout.shape[1:])
        full_rows = tuple(target.shape[1:]) == inner.shape
        if full_rows and target.is_contiguous():
            self._read(_bytes(target), start + first * inner.size)
        elif not full_rows and target[0].numel() * layout.dtype.itemsize >= _RUN:
            for index, row in enumerate(target):
                self._fill(row, inner, start + (first + index) * inner.size, offset[1:])
        else:
            step = max(1, _BLOCK // inner.size)
            inside = tuple(slice(low, low + size) for low, size in zip(offset[1:], target.shape[1:], strict=True))
            block = torch.empty((min(step, len(target)), *inner.shape), dtype=layout.dtype)
            for done in range(0, len(target), step):
                rows = block[:len(target) - done]
                self._read(_bytes(rows), start + (first + done) * inner.size)
                target[done:done + step].copy_(rows[:, *inside])

    def _read(self, memory: memoryview, position: int) -> None:
        while memory:
            count = os.preadv(self._file.fileno(), [memory], position)
            if not count:
                raise DamagedFileError(f"{self.path} ends at byte {position}")
            memory, position = memory[count:], position + count

    def _read_header(self) -> tuple[dict[str, FileLayout], dict[str, int]]:
        size = os.fstat(self._file.fileno()).st_size
        layouts = {}
        starts = {}
        end = 0
        try:
            length = int.from_bytes(self._file.read(8), "little")
            header = parsed_json(os.pread(self._file.fileno(), min(length, size), 8))
            header.pop("__metadata__", None)
            for name, entry in typed(header, dict[str, Header]).items():
                layouts[name] = FileLayout(DTYPES[entry["dtype"]], entry["shape"])
                starts[name], stop = 8 + length + entry["data_offsets"][0], entry["data_offsets"][1]
                if starts[name] + layouts[name].size != 8 + length + stop:
                    raise ValueError(f"the bytes of {name} are not those of its shape")
                end = max(end, stop)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise DamagedFileError(f"{self.path} has no valid header ({error})") from error
        if size != 8 + length + end:
            raise DamagedFileError(f"{self.path} has {size} bytes instead of {8 + length + end}")
        return layouts, starts
