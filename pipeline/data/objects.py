"""Objects where readers want files: at any place, and as zstd frames."""

from __future__ import annotations

import fcntl
import hashlib
import io
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from pipeline.data.zstd_frames import kept_starts, walked
from pipeline.stores.object_files import ObjectReader

if TYPE_CHECKING:
    import numpy as np


class Spool(io.RawIOBase):
    """An object that is read at any place, of which one range lies on this machine's disk."""

    def __init__(self, reader: ObjectReader) -> None:
        self._reader, self._file = reader, tempfile.TemporaryFile()  # noqa: SIM115
        self._start = self._stop = self._position = 0

    def keep(self, position: int, data: memoryview) -> None:
        """Take in what was read at `position`: what goes on where the last ended."""
        if self._start == self._stop:
            self._start = self._stop = position
        assert position == self._stop
        self._file.write(data)
        self._stop += len(data)

    def readable(self) -> bool:
        return True

    def size(self) -> int:
        """For Arrow."""
        return self._reader.size

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._reader.size}[whence]
        self._position = base + offset
        return self._position

    def readinto(self, buffer: Any) -> int:
        """Of the range that lies here, as much as that has; of the rest all that is asked for."""
        at, stop = self._position, min(self._position + len(buffer), self._reader.size)
        if at >= stop:
            return 0
        if self._start <= at < self._stop:
            self._file.seek(at - self._start)
            data = self._file.read(min(stop, self._stop) - at)
        else:
            data = self._reader.read(at, min(stop, self._start) if at < self._start else stop)
        buffer[:len(data)] = data
        self._position += len(data)
        return len(data)

    def read(self, size: int | None = -1) -> bytes:
        """All of what is asked for, as Arrow expects it, but at the end of the object."""
        wanted = self._reader.size - self._position if size is None or size < 0 else size
        parts = list[bytes]()
        while wanted > 0 and (part := super().read(wanted)):
            parts.append(part)
            wanted -= len(part)
        return b"".join(parts)

    def close(self) -> None:
        self._file.close()
        super().close()


def object_frames(reader: ObjectReader, number: int, cache: Path | None = None) -> np.ndarray:
    """Where the frames of a zstd object begin, for which it is read once; by one process of a machine at a time.

    cache: a folder in which they are kept for who asks next.
    """
    key = hashlib.sha256(f"{reader.url}\0{reader.size}\0{number}".encode()).hexdigest()[:32]
    with _turn(cache, key):
        def walk() -> list[int]:
            with reader.open() as stream:
                return walked(_Forward(stream, reader.size))
        return kept_starts(key, cache, walk)


class _Forward:
    """The bytes of a stream, sliced from front to back."""

    def __init__(self, stream: BinaryIO, size: int) -> None:
        self._size, self._stream, self._at, self._held = size, stream, 0, b""

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, asked: int | slice) -> Any:
        if isinstance(asked, int):
            return self[asked:asked + 1][0]
        start, stop, _ = asked.indices(self._size)
        while self._at + len(self._held) < stop:
            assert start >= self._at
            held, more = self._held[start - self._at:], self._stream.read(1 << 20)
            assert more
            self._at += len(self._held) - len(held)
            self._held = held + more
        return self._held[start - self._at:stop - self._at]


@contextmanager
def _turn(cache: Path | None, key: str) -> Iterator[None]:
    """One after another, as far as the disk knows locks."""
    if cache is None:
        yield
        return
    cache.mkdir(parents=True, exist_ok=True)
    with open(cache / f"{key}.lock", "ab") as file:
        with suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
