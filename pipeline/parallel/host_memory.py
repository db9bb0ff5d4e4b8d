"""How the C library deals with memory of the host."""

from __future__ import annotations

import ctypes

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_MMAP_MAX = -1, -3, -4
"""Of glibc's malloc.h: how much free memory the heap keeps at its end (-1: all), from which size on blocks lie outside
of it, and how many may."""


def keep_freed_memory() -> None:
    """Keep what tensors have freed for the next ones, which are as large.

    glibc gives large blocks back to the kernel at once, and the next step gets every page of them anew, zeroed: 3 to 5%
    of a training step on a CPU. Under another C library nothing is changed.
    """
    _set({M_MMAP_MAX: 0, M_TRIM_THRESHOLD: -1})


def return_freed_memory() -> None:
    """Give blocks of 128 KiB and more back to the kernel as soon as they are freed: for work that is larger than memory
    and holds one part of it after the other, in blocks of unequal sizes, between which a heap keeps what is of no use.

    This is what glibc begins with. By itself it learns that larger and larger blocks come again, and keeps them.
    """
    _set({M_MMAP_MAX: 65536, M_MMAP_THRESHOLD: 128 << 10, M_TRIM_THRESHOLD: 128 << 10})


def _set(options: dict[int, int]) -> None:
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        for option, value in options.items():
            mallopt(option, value)
