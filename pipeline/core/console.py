"""Console output of a stage: plain lines, or one live progress line on a terminal; and notations of times."""

from __future__ import annotations

import math
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from typing import IO

Say = Callable[[str], None]
"""Prints a message for the user."""
_CONTROL = re.compile("[\0-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str) -> str:
    """Text from an untrusted file, safe for a terminal: control characters are escaped, and so are those that change
    the direction of writing and halves of characters."""
    return _CONTROL.sub(lambda one: f"\\x{ord(one[0]):02x}" if one[0] < "\u0100" else f"\\u{ord(one[0]):04x}", text)


def echo(*lines: str, file: IO[str] | None = None) -> None:
    """Print lines, flushed immediately so that logs and pipes show them. Names and texts in them may be somebody
    else's: `printable`."""
    print(*map(printable, lines), sep="\n", file=file, flush=True)


def say(stage: str, text: str) -> None:
    """Print one line of a stage's output."""
    echo(f"{stage:<9} {text}")


def duration(seconds: float) -> str:
    """Seconds in readable form: 12 s, 3 m 05 s, 2 h 10 m."""
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} m {rest:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} m"


def readable(size: float) -> str:
    """Bytes in readable form, with three digits."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if size < 999.5:
            return f"{size:.3g} {unit}" if size else "0"
        size /= 1000
    return f"{size:.3g} PB"


class ProgressBar:
    """`label: done/total unit, rate, ETA`: redrawn in place on a terminal, a line every few seconds otherwise.

    file: where it is printed, by default to stdout.
    """

    def __init__(self, stage: str, label: str, total: int, unit: str, file: IO[str] | None = None) -> None:
        self.stage, self.label, self.total, self.unit = stage, label, total, unit
        self.file = file or sys.stdout
        self.live = self.file.isatty()
        self.every_s = 0.2 if self.live else 10.0
        self.done, self.first = 0, 0
        self.start = self.shown = time.monotonic()

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self.live:
            print("\r\x1b[K", end="", flush=True, file=self.file)
        if kind is None:
            elapsed = time.monotonic() - self.start
            self._say(f"{self.label}: {self.done}/{self.total} {self.unit} in {duration(elapsed)}")

    def _say(self, text: str) -> None:
        echo(f"{self.stage:<9} {text}", file=self.file)

    def already(self, count: int) -> None:
        """Count work that an earlier, interrupted run finished; it is not part of the rate."""
        self.done = self.first = count

    @property
    def left_s(self) -> float:
        """Estimated seconds to the end, at the rate since the start. Something must have been done."""
        return (self.total - self.done) * (time.monotonic() - self.start) / (self.done - self.first)

    def advance(self, units: int = 1) -> None:
        """Count finished units and occasionally print the progress."""
        self.done += units
        now = time.monotonic()
        if now - self.shown < self.every_s or self.done >= self.total:
            return
        self.shown = now
        rate = (self.done - self.first) / (now - self.start)
        text = (f"{self.label}: {self.done}/{self.total} {self.unit}, {rate:.1f}/s, "
                f"{duration(self.left_s)} to go")
        if self.live:
            print(f"\r\x1b[K{self.stage:<9} {printable(text)}", end="", flush=True, file=self.file)
        else:
            self._say(text)


def number_ranges(ranks: Sequence[int]) -> str:
    """Ascending numbers, such as ranks, in short: 0-2, 5."""
    result = []
    for _, group in groupby(enumerate(ranks), key=lambda pair: pair[1] - pair[0]):
        run = [number for _, number in group]
        result.append(f"{run[0]}" if len(run) == 1 else f"{run[0]}-{run[-1]}")
    return ", ".join(result)


def counted(number: int, word: str) -> str:
    """A number with its noun: 1 rank, 2 ranks."""
    return f"{number} {word}{'' if number == 1 else 's'}"


def first(names: Sequence[str], most: int = 3, what: str = "more") -> str:
    """The first of some names, and the number of the others: a, b, c and 4 more."""
    rest = f" and {len(names) - most:,} {what}" if len(names) > most else ""
    return ", ".join(names[:most]) + rest


@contextmanager
def quiet_imports() -> Iterator[None]:
    """Hide warnings that libraries log during import, such as torchao's about kernels for other GPUs."""
    import logging
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)


def aligned(rows: Sequence[Sequence[str]], just: Callable[[str, int], str] = str.ljust) -> list[str]:
    """A table for a terminal. just: how cells outside the first column are padded to their width."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join([first.ljust(widths[0]), *map(just, others, widths[1:])]).rstrip() for first, *others in rows]


def markdown(rows: Sequence[Sequence[str]]) -> list[str]:
    """A table of Markdown; the first row is its heading."""
    return [f"| {' | '.join(cells)} |" for cells in (rows[0], ["---"] * len(rows[0]), *rows[1:])]


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
