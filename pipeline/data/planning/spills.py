"""What a unit puts aside on the disk while it works: files of rows, gone when it ends."""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

import numpy as np

ROWS_AT_ONCE = 1 << 20
"""Rows that are read at once."""


class Spills:
    """Files of rows in a folder of this process alone. Its name ends in .tmp, so that whoever clears what killed
    writers left takes it as well; and what a killed process left of the same unit goes when this one begins.

    Raises:
        OSError: while it is written, the disk is full or does not work; the error names the file.
    """

    def __init__(self, folder: Path, name: str) -> None:
        for left in folder.glob(f"{name}.*.tmp"):
            shutil.rmtree(left, ignore_errors=True)  # an orphan may still write into it
        self.folder = folder / f"{name}.{platform.node()}-{os.getpid()}.tmp"
        self._open: dict[str, IO[bytes]] = {}

    def __enter__(self) -> Spills:
        self.folder.mkdir(parents=True)
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._open.values():
            with suppress(OSError):  # what it still held finds no room either
                file.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def add(self, name: str, rows: np.ndarray) -> None:
        """Put rows at the end of a file."""
        path = self.folder / name
        with _named(path):
            if name not in self._open:
                self._open[name] = open(path, "wb")  # noqa: SIM115 (closed once it is read)
            self._open[name].write(np.ascontiguousarray(rows).data)

    def read(self, name: str, dtype: np.dtype) -> Iterator[np.ndarray]:
        """All rows of a file, some at a time; none of one that was not begun. Nothing is added to it any more."""
        path = self.folder / name
        if name in self._open:
            with _named(path):
                self._open.pop(name).close()
        if path.is_file():
            with open(path, "rb") as file:
                while len(rows := np.fromfile(file, dtype, ROWS_AT_ONCE)):
                    yield rows

    def remove(self, name: str) -> None:
        """Remove a file that was read."""
        (self.folder / name).unlink(missing_ok=True)


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """An error of writing says what was written."""
    try:
        yield
    except OSError as error:
        if error.errno is None or error.filename is not None:
            raise
        raise OSError(error.errno, os.strerror(error.errno), str(path)) from error
