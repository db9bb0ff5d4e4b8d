"""How much memory a rank can still allocate: on its GPU, or on the host that it shares with others."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

if TYPE_CHECKING:
    import torch

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
