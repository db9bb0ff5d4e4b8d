"""Settings of the C library's allocator."""

from __future__ import annotations

import ctypes

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_MMAP_MAX = -1, -3, -4
"""From glibc's malloc.h: how much free memory the heap keeps at its end (-1: all), from which size on blocks are
allocated outside of it (by mmap), and how many such blocks there may be."""


def keep_freed_memory() -> None:
    """Keep the memory that tensors have freed for the next ones, which are equally large.

    By default glibc returns large blocks to the kernel at once, and the next step gets new, zeroed pages: 3 to 5% of a
    training step on a CPU. Other C libraries are left unchanged.
    """
    _set({M_MMAP_MAX: 0, M_TRIM_THRESHOLD: -1})


def always_return_freed_memory() -> None:
    """Return blocks of 128 KiB and more to the kernel as soon as they are freed. This is for work larger than memory
    that holds one part after the other, in blocks of unequal sizes: a heap would keep unusable gaps between them.

    These are glibc's initial values. By itself it raises them while a program frees larger and larger blocks.
    """
    _set({M_MMAP_MAX: 65536, M_MMAP_THRESHOLD: 128 << 10, M_TRIM_THRESHOLD: 128 << 10})


def _set(options: dict[int, int]) -> None:
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        for option, value in options.items():
            mallopt(option, value)
