"""Slurm's notations of times."""

from __future__ import annotations

import math
import re


def minutes(time: int | str) -> int:
    """A time limit in minutes, rounded up; ValueError if it is none, zero or longer than Slurm counts."""
    seconds = seconds_of(time)
    if not 0 < seconds < 60 * 2**31:
        raise ValueError(f"{str(time)[:40]} is {'longer than Slurm counts' if seconds else 'no time at all'}")
    return math.ceil(seconds / 60)


def seconds_of(time: int | str) -> int:
    """Seconds from any of Slurm's notations: minutes, minutes:seconds, hours:minutes:seconds, days-hours,
    days-hours:minutes, days-hours:minutes:seconds.

    Raises:
        ValueError: it is none of them.
    """
    text = str(time).strip()
    if not re.fullmatch(r"(\d+-)?\d+(:\d+){0,2}", text):
        raise ValueError(f"{str(time)[:40]!r} is no time limit: write minutes, HH:MM:SS or D-HH:MM:SS")
    days, dash, rest = text.rpartition("-")
    units = (3600, 60, 1) if dash or rest.count(":") == 2 else (60, 1)
    return int(days or 0) * 86400 + sum(int(part) * unit for part, unit in zip(rest.split(":"), units, strict=False))
