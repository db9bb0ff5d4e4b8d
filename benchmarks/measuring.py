"""The one way to measure: contenders take turns, times become ratios in a round, rows become a table and a record."""

from __future__ import annotations

import argparse
import os
import platform
import re
import resource
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

from drover.pipeline.core.console import markdown
from drover.pipeline.core.files import write_json, write_text

PACKAGES = ("torch", "transformers", "deepspeed", "torchao", "datatrove", "tokenizers", "fastokens", "numpy",
            "pyarrow", "rensa")
"""Whose versions are recorded, as far as they are installed."""
T = TypeVar("T")
Row = dict[str, Any]
"""A measurement: `name`, and `rate` where more is better; other figures by name."""
RATES = {"": "{name}", "{unit}/s": "{rate:,.2f}", "{unit}/s of the processor": "{cpu_rate:,.2f}",
         "times as fast as": "{beside}", "clock, median (least - most)": "{wall_ratio:.2f} ({wall_least:.2f} - "
         "{wall_most:.2f})", "processor, median": "{cpu_ratio:.2f}"}
"""Columns for the rows of `compared`."""


@dataclass(frozen=True)
class Taken:
    """What one measurement took, in seconds of the clock and of the processor."""

    wall: float
    cpu: float


def command(arguments: Sequence[str]) -> Taken:
    """Run a command to its end; what it and its children took. RuntimeError, with what it said, where it fails."""
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    done = subprocess.run(arguments, capture_output=True, text=True, check=False)
    wall, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        raise RuntimeError(f"{' '.join(arguments)} ended with {done.returncode}:\n{done.stdout[-2000:]}"
                           f"{done.stderr[-2000:]}")
    return Taken(wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)


def turns(contenders: Sequence[T], rounds: int) -> list[T]:
    """Each so many times, in an order that turns round (A B, B A, A B): a slow moment then meets all."""
    return [one for number in range(rounds) for one in contenders[::-1 if number % 2 else 1]]


def alternated(contenders: Mapping[str, Callable[[], Taken]], rounds: int) -> dict[str, list[Taken]]:
    """Measure each `rounds` times, by turns."""
    taken: dict[str, list[Taken]] = {name: [] for name in contenders}
    for name in turns([*contenders], rounds):
        taken[name].append(contenders[name]())
    return taken


def compared(taken: Mapping[str, list[Taken]], amount: float, unit: str, beside: str | None = None) -> list[Row]:
    """A row a contender: `amount` of `unit` over the median time, and ratios to `beside`, each within a round."""
    rows = []
    for name, times in taken.items():
        row: Row = {"name": name, "unit": unit, "seconds": [one.wall for one in times],
                    "rate": amount / statistics.median(one.wall for one in times),
                    "cpu_rate": amount / max(1e-9, statistics.median(one.cpu for one in times))}
        if beside is not None and beside in taken and name != beside:
            row["beside"] = beside
            for which in ("wall", "cpu"):
                ratios = [getattr(other, which) / max(1e-9, getattr(own, which))
                          for own, other in zip(times, taken[beside], strict=True)]
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
    """Rows as they are measured: printed at once, and written after each to results.json and results.md in `folder`.

    A section's columns are formats of a row's figures, such as {"tokens/s": "{rate:,.0f}"}. facts: of the machine and
    the measurement. notes: sentences that stand before the tables.
    """

    def __init__(self, name: str, folder: Path | None, **facts: Any) -> None:
        self.name, self.folder, self.facts = name, folder, {**machine(), **facts}
        self.notes: list[str] = []
        self.rows: list[Row] = []
        self.sections: dict[str, dict[str, str]] = {}
        self._shown = ""

    def add(self, section: str, columns: Mapping[str, str], *rows: Row) -> None:
        """Take rows into a section."""
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
            write_text(self.folder / "results.md", "\n\n".join([
                f"# {self.name}", facts, *(["\n".join(f"- {note}" for note in self.notes)] if self.notes else []),
                *(f"## {section}\n\n{self._table(section)}" for section in self.sections)]) + "\n")

    def _table(self, section: str) -> str:
        columns, rows = self.sections[section], [row for row in self.rows if row["section"] == section]
        return "\n".join(markdown([[cell(name, rows[0]) if name else "" for name in columns],
                                   *([cell(form, row) for form in columns.values()] for row in rows)]))


def machine() -> dict[str, Any]:
    """Time, processor, load and versions."""
    try:
        found = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text())
    except OSError:
        found = None
    return {"date": datetime.now(UTC).isoformat(timespec="seconds"), "cpu": found[1] if found else platform.machine(),
            "cores": os.cpu_count(), "load": round(os.getloadavg()[0], 1), "python": platform.python_version(),
            **{name: version for name in PACKAGES if (version := version_of(name))}}


def version_of(package: str) -> str | None:
    """The installed version of a package, if it is."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def positive(text: str) -> int:
    """Read a count from the command line."""
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"must be a whole number above 0, not {text}")
    return int(text)
