"""Where the frames of a zstd file begin: found by walking from header to header, so that no bytes inside of a frame are
taken for one. Layout: RFC 8878, section 3.1."""

from __future__ import annotations

import hashlib
import mmap
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.files import atomic_file

if TYPE_CHECKING:
    import numpy as np

MAGIC = b"\x28\xb5\x2f\xfd"
SKIPPABLE = b"\x2a\x4d\x18"
"""After a first byte of 0x50 to 0x5f: a frame without data."""
Bytes = Any
"""What has a length and gives slices, as `bytes` do."""
RAW, RLE, COMPRESSED = 0, 1, 2
"""Kinds of blocks; there is a fourth, which is reserved."""
_DICTIONARY_BYTES, _SIZE_BYTES = (0, 1, 2, 4), (0, 2, 4, 8)


def frame_starts(path: Path, cache: Path | None = None) -> np.ndarray:
    """Offsets of the frames with data, in order, as far as headers can be followed.

    cache: a folder in which they are kept for who asks next; the file is known by path, size and time.
    """
    about = path.stat()
    key = hashlib.sha256(f"{path}\0{about.st_size}\0{about.st_mtime_ns}".encode("utf-8", "surrogateescape"))
    def walk() -> list[int]:
        with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            data.madvise(mmap.MADV_RANDOM)  # of every block, the header alone is looked at
            return walked(data)
    return kept_starts(key.hexdigest()[:32], cache, walk)


def kept_starts(key: str, cache: Path | None, walk: Callable[[], list[int]]) -> np.ndarray:
    """What `walk` finds, or found when it was asked for under this key before."""
    import numpy as np
    kept = None if cache is None else cache / f"{key}.npy"
    if kept is not None:
        with suppress(OSError, ValueError):
            return np.load(kept)
    starts = np.array(walk(), dtype=np.int64)
    if kept is not None:
        with suppress(OSError), atomic_file(kept) as out:  # only a cache: a full disk need not end the reading
            np.save(out, starts)
    return starts


def walked(data: Bytes) -> list[int]:
    """The offsets of the frames with data in a file's bytes, which are looked at from front to back."""
    found, at = [], 0
    while at + 8 <= len(data):
        if data[at:at + 4] == MAGIC:
            found.append(at)
            at = _end_of_frame(data, at)
        elif is_skippable(data[at:at + 4]):
            at += 8 + int.from_bytes(data[at + 4:at + 8], "little")
        else:
            break  # whoever unpacks it finds what is wrong
    return found


def _end_of_frame(data: Bytes, at: int) -> int:
    """Where the frame at `at` ends; the file's end, where it breaks off or is damaged."""
    size, checksum = frame_header(data[at + 4])
    at += size
    while at + 3 <= len(data):
        last, kind, length = block(data[at:at + 3])
        if kind not in (RAW, RLE, COMPRESSED):
            break
        at += 3 + (1 if kind == RLE else length)
        if last:
            return at + checksum
    return len(data)


def is_skippable(start: bytes) -> bool:
    """Whether a frame without data begins with these bytes, as `pzstd` writes one before each frame."""
    return start[1:4] == SKIPPABLE and 0x50 <= start[0] <= 0x5f


def frame_header(about: int) -> tuple[int, int]:
    """By a frame's fifth byte: the bytes of its header, from its first on, and those of the checksum at its end."""
    single = about >> 5 & 1
    size = _SIZE_BYTES[about >> 6] or single
    return 5 + (not single) + _DICTIONARY_BYTES[about & 3] + size, 4 * (about >> 2 & 1)


def block(start: bytes) -> tuple[bool, int, int]:
    """What the first three bytes of a block say: whether it is its frame's last, its kind, and the bytes of what
    stands in it (of RLE: is made of it)."""
    header = int.from_bytes(start, "little")
    return bool(header & 1), header >> 1 & 3, header >> 3
