"""What a person sees of a program: plain lines, or one live progress line on a terminal; notations of times; and the
command line, with one parser, one meaning of RUN, one format of errors."""

from __future__ import annotations

import argparse
import math
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import IO, Any, NoReturn, TextIO

from drover.pipeline.core.errors import UserError, is_full_disk, meant

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


RUNS = "runs"
"""The folder in which runs are found by name."""
OF_WEIGHTS = ("config.json", "index.json")
"""A folder of weights contains one of these: Hugging Face's form, ours."""
INTERRUPTED = 130


def in_colour(stream: TextIO) -> bool:
    """Whether to print colours to a stream: on a terminal, unless NO_COLOR is set (https://no-color.org)."""
    return stream.isatty() and not os.environ.get("NO_COLOR")


def complain(text: str) -> None:
    """Print an error for the user."""
    sys.stdout.flush()
    opening = "\x1b[31merror:\x1b[0m" if in_colour(sys.stderr) else "error:"
    print(f"{opening} {printable(text)}", file=sys.stderr, flush=True)


class Parser(argparse.ArgumentParser):
    """argparse's parser. It names all unknown options at once, each with the option that was meant."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """As argparse; exits with status 2 where an option is unknown."""
        return super().parse_known_args(self._known(args), namespace)

    def parse_known_intermixed_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """The same for options between other words; since Python 3.12.8 it does not call the method above."""
        return super().parse_known_intermixed_args(self._known(args), namespace)

    def _known(self, args: Any) -> list[str]:
        words = sys.argv[1:] if args is None else list(args)
        options = words[:words.index("--")] if "--" in words else words
        known = self._option_string_actions
        unknown = [] if self._subparsers else [
            f"there is no option {name}; {meant(name, known, f'{self.prog} --help shows all.')}" for word in options
            if word.startswith("--") and " " not in word
            and not any(one.startswith(name := word.partition("=")[0]) for one in known)]
        if unknown:
            self.error(" ".join(unknown))
        return words

    def error(self, message: str) -> NoReturn:
        """Print the error and exit with status 2."""
        complain(message)
        self.exit(UserError.exit_status)


@dataclass(frozen=True)
class Program:
    """A program. Calling it runs it, with the process's arguments by default, and returns its exit status.

    Attributes:
        name: the command that starts it.
        doc: its help text; the first line summarizes it.
        options: adds its options to a parser.
        work: runs it; returns the exit status, or None for 0.
        mixed: options may come before and after a list of words, such as settings.
        interrupted: printed after Ctrl-C.
    """

    name: str
    doc: str | None
    options: Callable[[Parser], object]
    work: Callable[[argparse.Namespace], int | None]
    mixed: bool = False
    interrupted: str = "interrupted"

    def parser(self, name: str = "") -> Parser:
        """Its parser. name: the command that starts it, if it is not `self.name`."""
        parser = Parser(prog=name or self.name, description=self.doc,
                        formatter_class=argparse.RawDescriptionHelpFormatter)
        self.options(parser)
        return parser

    def __call__(self, arguments: Sequence[str] | None = None, name: str = "") -> int:
        parser = self.parser(name)
        try:
            return int(self.work((parser.parse_intermixed_args if self.mixed else parser.parse_args)(arguments)) or 0)
        except UserError as error:
            complain(str(error))
            return error.exit_status
        except KeyboardInterrupt:
            print(f"\n{self.interrupted}", file=sys.stderr)
            return INTERRUPTED
        except Exception as error:
            if isinstance(error, BrokenPipeError):  # the reader of a pipe, such as `| head`, has ended
                sys.stderr.close()
                return 1
            if not is_full_disk(error):
                raise
            complain(f"The disk, quota or file size limit is exhausted: {error}. Make room and give the same command "
                     f"again: it continues with what is written.")
            return UserError.exit_status


def find_run(text: str) -> Path:
    """The folder of a run, from its path or its name; UserError if there is none."""
    for folder in (Path(text), Path(RUNS) / text):
        if is_run(folder):
            return folder if folder.name else folder.resolve()  # for `.`: the folder's name is the run's name
    known = ", ".join(folder.name for folder in runs_in(Path(RUNS)))
    raise UserError(f"There is no run {text}. The runs in {RUNS} are: {known or 'none'}.")


def find_model(text: str) -> Path:
    """The path of weights, or the folder of a run by its name. A name has no slash. A folder of text with the same name
    as a run is not meant."""
    path, named = Path(text), Path(RUNS) / text
    if "/" in text:
        return path
    weights = is_run(path) or any((path / name).is_file() for name in OF_WEIGHTS)
    return named if is_run(named) and not weights else path


def runs_in(folder: Path) -> list[Path]:
    """The runs in a folder, by name."""
    return sorted(one for one in folder.glob("*") if is_run(one))


def is_run(folder: Path) -> bool:
    """Whether a folder is a run's."""
    return (folder / "config.yaml").is_file() or (folder / "launch").is_dir()


class NamedRun(argparse.Action):
    """Replaces a run's name or folder by its folder."""

    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: str | None = None
                 ) -> None:
        if values is not None:
            setattr(namespace, self.dest, find_run(values))


def add_run(parser: argparse.ArgumentParser) -> None:
    """RUN, or --run RUN, for programs that work on one run."""
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("run", nargs="?", metavar="RUN", action=NamedRun, help="a run's name (demo) or folder "
                       "(runs/demo); --run RUN is the same")
    which.add_argument("--run", metavar="RUN", action=NamedRun, help=argparse.SUPPRESS)


def add_json(parser: argparse.ArgumentParser) -> None:
    """--json."""
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")


def refuse_low(options: argparse.Namespace, *names: str) -> None:
    """UserError for options that are given and not above 0."""
    if low := [f"--{name.replace('_', '-')} must be above 0, not {value}" for name in names
               if (value := getattr(options, name)) is not None and not value > 0]:
        raise UserError("; ".join(low) + ".")
