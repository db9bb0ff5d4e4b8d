"""Commands and functions timed beside each other, and what their times come to."""

from __future__ import annotations

import os
import resource
import statistics
import subprocess
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from pipeline.errors import UserError

REPOSITORY = Path(__file__).resolve().parents[2]


class LeftOut(Exception):  # noqa: N818 - it is told, not an error
    """A section cannot be measured here; the message says why."""


@dataclass
class Taken:
    """What one measurement took, in seconds."""

    wall: float
    cpu: float


Contender = Callable[[], Taken]
Row = dict[str, Any]


def alternated(contenders: dict[str, Contender], rounds: int) -> dict[str, list[Taken]]:
    """Each measured `rounds` times, in an order that turns round: A B, B A, A B."""
    taken: dict[str, list[Taken]] = {name: [] for name in contenders}
    for number in range(rounds):
        for name in list(contenders)[::-1 if number % 2 else 1]:
            taken[name].append(contenders[name]())
    return taken


def rows_of(section: str, taken: dict[str, list[Taken]], mb: float, beside: str | None,
            start: dict[str, Taken] | None = None) -> list[Row]:
    """A row a contender: medians in MB/s, and ratios to the contender `beside`."""
    def measurable(name: str) -> bool:  # not, where the machine was so busy or the text so short that the start is all
        return start is not None and all(one.wall > 1.2 * start[name].wall for one in taken[name])
    rows = []
    for name, all_taken in taken.items():
        row: Row = {"section": section, "name": name, "wall_mb_per_s": mb / median(one.wall for one in all_taken),
                    "cpu_mb_per_s": mb / max(1e-9, median(one.cpu for one in all_taken)),
                    "taken": [vars(one) for one in all_taken]}
        if start is not None:
            row["start_s"] = start[name].wall
            if measurable(name):
                row["net_mb_per_s"] = mb / median(one.wall - start[name].wall for one in all_taken)
        if beside in taken and name != beside:
            pairs = list(zip(all_taken, taken[beside], strict=True))
            row["ratio_wall"] = median(theirs.wall / own.wall for own, theirs in pairs)
            row["ratio_cpu"] = median(theirs.cpu / own.cpu for own, theirs in pairs)
            if start is not None and measurable(name) and measurable(beside):
                row["ratio_net"] = median((theirs.wall - start[beside].wall) / (own.wall - start[name].wall)
                                          for own, theirs in pairs)
            row["beside"] = beside
        rows.append(row)
    return rows


def command(arguments: list[str]) -> Taken:
    """Run a command to its end; what it and its children took."""
    environment = {**os.environ, "RAYON_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1",
                   "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(REPOSITORY)}
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    done = subprocess.run(arguments, capture_output=True, text=True, env=environment, cwd=REPOSITORY, check=False)
    wall, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        raise UserError(f"{' '.join(arguments)} failed:\n{done.stderr[-2000:]}")
    return Taken(wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)


def timed(work: Callable[[], Any]) -> Contender:
    """A function of this process as something to measure."""
    def measure() -> Taken:
        began, cpu = time.perf_counter(), time.process_time()
        work()
        return Taken(time.perf_counter() - began, time.process_time() - cpu)
    return measure


def median(values: Iterable[float]) -> float:
    """The median."""
    return statistics.median(values)


def version_of(package: str) -> str | None:
    """The installed version of a package, if it is."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
