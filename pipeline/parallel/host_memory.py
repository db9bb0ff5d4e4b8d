"""The host's memory: settings of the C library's allocator, and how much a rank can still allocate, also on its GPU."""

from __future__ import annotations

import ctypes
import os
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

if TYPE_CHECKING:
    import torch

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


CGROUPS, OWN_GROUPS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
_OF_GROUP = (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes"))
"""The files of limit and use, in version 2 and version 1 of control groups."""


def free_memory(device: torch.device) -> int:
    """Bytes that this rank can still allocate on its device. Ranks on one host's CPUs share its free memory, or that of
    the job's control group, evenly. A limit of the process (`ulimit -v`, `ulimit -d`) is not shared."""
    if device.type == "cuda":
        import torch
        return int(torch.cuda.mem_get_info(device)[0])
    return min([free_on_host() // int(os.environ.get("LOCAL_WORLD_SIZE", "1")), *_of_process()])


def free_on_host() -> int:
    """Bytes that all processes together can still allocate on the host."""
    return min([_of_host(), *_of_groups()])


def _of_host() -> int:
    return int(psutil.virtual_memory().available)


def _of_groups() -> Iterator[int]:
    """Free bytes of each control group that this process is in."""
    try:
        lines = OWN_GROUPS.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, kinds, path = line.split(":", 2)
        if kinds and "memory" not in kinds.split(","):
            continue
        place = CGROUPS / "memory" / path[1:] if kinds else CGROUPS / path[1:]
        for folder in (place, *place.parents):
            if folder == CGROUPS.parent:
                break
            for limit, used in _OF_GROUP:
                try:
                    yield int((folder / limit).read_text()) - int((folder / used).read_text()) + _cached(folder)
                except (OSError, ValueError):  # no such file, or "max"
                    continue


def _cached(folder: Path) -> int:
    """Bytes of cached files. A group's use counts them, but the kernel frees them when memory is needed."""
    try:
        result = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return 0
    return sum(int(result.get(f"total_{kind}", result.get(kind, 0))) for kind in ("inactive_file", "active_file"))


def _of_process() -> Iterator[int]:
    used = psutil.Process().memory_info()
    for kind, size in ((resource.RLIMIT_AS, used.vms), (resource.RLIMIT_DATA, getattr(used, "data", 0))):
        soft, _ = resource.getrlimit(kind)
        if soft != resource.RLIM_INFINITY:
            yield max(0, soft - size)
