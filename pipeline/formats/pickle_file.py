"""Tensors in the files that torch.save writes (.pth, .bin), mapped: read in parts, and nothing else is unpickled.

A pickle may call any function. `torch.load(weights_only=True)` knows tensors and a few containers and refuses the rest
before anything of it runs. The file is mapped privately: a page comes into memory when a rectangle on it is read, and
may leave it again; but the system must be ready to grant the memory of one file, and limits count it.
"""

from __future__ import annotations

import errno
import os
import pickle
import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pipeline.formats.tensor_file import DTYPE_NAMES, DamagedFileError, Layout

_ZIP = b"PK\x03\x04"
_PROBLEMS = (pickle.UnpicklingError, RuntimeError, OSError, EOFError, ValueError, TypeError, LookupError,
             AttributeError, AssertionError, OverflowError)
"""What torch raises for files that are torn, or hold something else than tensors."""


class PickleFile:
    """A mapping of names to tensors in one file, open for reading any rectangle. The counterpart of `TensorFile`.

    Raises DamagedFileError if it is missing, torn, or holds anything but named tensors on the host.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._tensors = _load(path)
        self.layouts = {name: Layout(tensor.dtype, tuple(tensor.shape)) for name, tensor in self._tensors.items()}

    def close(self) -> None:
        """Give the file back."""
        self._tensors.clear()

    def read_into(self, target: Tensor, name: str, offset: tuple[int, ...]) -> None:
        """Fill `target` with the rectangle of the tensor `name` that starts at `offset` and has target's shape."""
        target.copy_(self._tensors[name][tuple(slice(start, start + size) for start, size
                                               in zip(offset, target.shape, strict=True))])

    def is_one_tensor(self, name: str, other: str) -> bool:
        """Whether two names stand for the same values in the file, not for two copies."""
        one, two = self._tensors[name], self._tensors[other]
        return (one.data_ptr(), one.shape, one.stride()) == (two.data_ptr(), two.shape, two.stride())


def _load(path: Path) -> dict[str, Tensor]:
    try:
        with open(path, "rb") as file:
            start = file.read(len(_ZIP))
    except FileNotFoundError as error:
        raise DamagedFileError(f"{path} is missing") from error
    except OSError as error:
        raise DamagedFileError(f"{path} cannot be read ({error.strerror})") from error
    if start != _ZIP:
        raise DamagedFileError(f"{path} is no zip file, as torch.save has written since torch 1.6. An older file can "
                               f"be read with torch.load(path, weights_only=True) and saved again with torch.save")
    try:
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except _PROBLEMS as error:
        if os.strerror(errno.ENOMEM) in str(error):
            raise DamagedFileError(f"{path} cannot be mapped, for which a process must be allowed its "
                                   f"{path.stat().st_size / 1e9:,.1f} GB of memory, though it takes less (ulimit -v, "
                                   f"ulimit -d, vm.overcommit_memory)") from error
        raise DamagedFileError(f"{path} is torn, or holds something else than tensors; nothing of it was executed "
                               f"({_what(error)})") from error
    if not isinstance(content, dict):
        raise DamagedFileError(f"{path} holds a {type(content).__name__} instead of named tensors")
    strange = [name for name, value in content.items() if not isinstance(name, str) or not _is_plain(value)]
    if strange:
        raise DamagedFileError(f"{path} has {str(strange[0])[:100]!r}, which is no plain tensor of a known type")
    return {name: tensor.detach() for name, tensor in content.items()}


def _is_plain(value: Any) -> bool:
    return (type(value) in (Tensor, torch.nn.Parameter) and value.layout == torch.strided and not value.is_quantized
            and value.device.type == "cpu" and value.dtype in DTYPE_NAMES)


def _what(error: BaseException) -> str:
    """The one sentence of torch's message that says what was found; others advise what must not be done here."""
    found = re.search(r"[^.\n]*\bunsupported\b.*?(?=\.?(\s\s|\. |\n|$))", str(error), re.IGNORECASE)
    return (found[0] if found else re.split(r"\. |\n", str(error).strip())[0] or type(error).__name__)[:200]
