"""How much a process may do at once."""

from __future__ import annotations

import os


def usable_cores() -> int:
    """Cores that this process may use; all of the machine's where the system, as macOS, knows no such limit."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity is not None else os.cpu_count() or 1
