"""Measure: contenders take turns, ratios are taken within a round, rows become a table and a record."""

from __future__ import annotations

import os
import platform
import resource
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

from drover.pipeline.core.console import markdown
from drover.pipeline.core.errors import installed_version
from drover.pipeline.core.files import write_json, write_text

PACKAGES = ("torch", "transformers", "deepspeed", "torchao", "datatrove", "tokenizers", "fastokens", "numpy",
            "pyarrow", "rensa")
"""Packages whose versions are recorded if they are installed."""
T = TypeVar("T")
Row = dict[str, Any]
"""A measurement: `name`, `rate` (more is better) and other figures by name."""
RATES = {"": "{name}", "{unit}/s": "{rate:,.2f}", "{unit}/s of CPU time": "{cpu_rate:,.2f}",
         "times as fast as": "{baseline}", "wall time, median (min - max)": "{wall_ratio:.2f} ({wall_least:.2f} - "
         "{wall_most:.2f})", "CPU time, median": "{cpu_ratio:.2f}"}
"""Columns for the rows of `compared`."""


@dataclass(frozen=True)
class Taken:
    """The wall time and CPU time of a measurement, in seconds."""

    wall: float
    cpu: float


def command(arguments: Sequence[str]) -> Taken:
    """Run a command to its end. Returns its time, with its children's. RuntimeError, with its output, if it fails."""
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    done = subprocess.run(arguments, capture_output=True, text=True, check=False)
    wall, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        raise RuntimeError(f"{' '.join(arguments)} ended with {done.returncode}:\n{done.stdout[-2000:]}"
                           f"{done.stderr[-2000:]}")
    return Taken(wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)


def turns(contenders: Sequence[T], rounds: int) -> list[T]:
    """Each contender `rounds` times, in alternating order (A B, B A, A B), so that a slow moment affects all."""
    return [one for number in range(rounds) for one in contenders[::-1 if number % 2 else 1]]


def alternated(contenders: Mapping[str, Callable[[], Taken]], rounds: int) -> dict[str, list[Taken]]:
    """Measure each contender `rounds` times, in turns."""
    taken: dict[str, list[Taken]] = {name: [] for name in contenders}
    for name in turns([*contenders], rounds):
        taken[name].append(contenders[name]())
    return taken


def compared(taken: Mapping[str, list[Taken]], amount: float, unit: str, baseline: str) -> list[Row]:
    """A row per contender: `amount` of `unit` over the median time, and ratios to `baseline` within each round."""
    rows = []
    for name, times in taken.items():
        row: Row = {"name": name, "unit": unit, "seconds": [one.wall for one in times],
                    "rate": amount / statistics.median(one.wall for one in times),
                    "cpu_rate": amount / max(1e-9, statistics.median(one.cpu for one in times))}
        if baseline in taken and name != baseline:
            row["baseline"] = baseline
            for which in ("wall", "cpu"):
                ratios = [getattr(other, which) / max(1e-9, getattr(own, which))
                          for own, other in zip(times, taken[baseline], strict=True)]
                row |= {f"{which}_ratio": statistics.median(ratios), f"{which}_least": min(ratios),
                        f"{which}_most": max(ratios)}
        rows.append(row)
    return rows


def cell(form: str, row: Row) -> str:
    """Format the figures of a row; "-" where one is missing or None."""
    try:
        return form.format(**row).replace("|", "/").replace("\n", " ")
    except (KeyError, TypeError, ValueError):
        return "-"


class Record:
    """Prints rows as they are measured, and writes them to results.json and results.md in `folder`.

    A section's columns are formats of a row's figures, such as {"tokens/s": "{rate:,.0f}"}. facts: about the machine
    and the measurement.
    """

    def __init__(self, name: str, folder: Path | None) -> None:
        self.name, self.folder, self.facts = name, folder, machine()
        self.rows: list[Row] = []
        self.sections: dict[str, dict[str, str]] = {}
        self._shown = ""

    def add(self, section: str, columns: Mapping[str, str], *rows: Row) -> None:
        """Add rows to a section."""
        again = section == self._shown
        self.sections[section], self._shown = dict(columns), section
        self.rows += [{"section": section, **row} for row in rows]
        lines = self._table(section).splitlines()
        print("\n".join([*([] if again else ["", section, *lines[:2]]), *lines[-len(rows):]]), flush=True)
        self.save()

    def save(self) -> None:
        """Write both files, if there is a folder."""
        if self.folder is not None:
            self.folder.mkdir(parents=True, exist_ok=True)
            write_json(self.folder / "results.json", {"benchmark": self.name, **self.facts, "rows": self.rows})
            facts = ", ".join(f"{key} {value}" for key, value in self.facts.items() if value is not None)
            tables = [f"## {section}\n\n{self._table(section)}" for section in self.sections]
            write_text(self.folder / "results.md", "\n\n".join([f"# {self.name}", facts, *tables]) + "\n")

    def _table(self, section: str) -> str:
        columns, rows = self.sections[section], [row for row in self.rows if row["section"] == section]
        return "\n".join(markdown([[cell(name, rows[0]) if name else "" for name in columns],
                                   *([cell(form, row) for form in columns.values()] for row in rows)]))


def machine() -> dict[str, Any]:
    """Time, processor, load and versions."""
    return {"date": datetime.now(UTC).isoformat(timespec="seconds"), "cpu": processor(), "cores": os.cpu_count(),
            "load": round(os.getloadavg()[0], 1), "python": platform.python_version(),
            **{name: version for name in PACKAGES if (version := installed_version(name))}}


def processor() -> str:
    """The processor's name, as far as the system says it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
