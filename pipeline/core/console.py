"""What a person sees of a program: plain lines, or one live progress line on a terminal; notations of times; and the
command line, with one parser, one meaning of RUN, one format of errors."""

from __future__ import annotations

import argparse
import math
import os
import re
import shutil
import sys
import textwrap
import time
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NoReturn

from drover.pipeline.core.errors import UserError, is_full_disk, meant

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
    from rich.live import Live
    from rich.table import Table

LIVE_S, PLAIN_S = 0.2, 10.0
"""Seconds between two looks at progress: on a terminal, and elsewhere."""
ALARMS = {"error:": "bold red", "warning:": "bold yellow", "WARNING:": "bold yellow"}
"""What is coloured in a line on a terminal."""
STAGE = 10
"""Columns of a stage's name, before what is printed of it."""
Say = Callable[[str], None]
"""Prints a message for the user."""
Watch = Callable[[Any], Iterator[Any]]
"""Passes the batches of a list on, and may show how many are done."""
_CONTROL = re.compile("[\0-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str) -> str:
    """Text from an untrusted file, safe for a terminal: control characters are escaped, and so are those that change
    the direction of writing and halves of characters."""
    return _CONTROL.sub(lambda one: f"\\x{ord(one[0]):02x}" if one[0] < "\u0100" else f"\\u{ord(one[0]):04x}", text)


def can_draw(stream: IO[str]) -> bool:
    """Whether a stream is a terminal that takes colours and lines that are drawn again: not with NO_COLOR
    (https://no-color.org), and not a dumb one."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") not in ("dumb", "unknown")


def screen_of(stream: IO[str]) -> Console:
    """rich's console of a stream. It takes no word of a text for a command of its own. What is no terminal has only the
    width that COLUMNS gives, so that no table is folded there without it."""
    from rich.console import Console

    # Not by rich's own judgement: FORCE_COLOR would put colours into logs.
    width = None if stream.isatty() or "COLUMNS" in os.environ else 100_000
    return Console(file=stream, force_terminal=can_draw(stream), width=width,
                   soft_wrap=True, markup=False, emoji=False, highlight=False)


def draw(*things: RenderableType, file: IO[str] | None = None, most: int | None = None) -> None:
    """Print lines, tables and texts of rich, flushed immediately. Where a terminal is too narrow for a line, it is
    continued below its text. most: so many lines, the first."""
    screen = screen_of(file or sys.stdout)
    with screen.capture() as drawn:
        for thing in things:
            screen.print(_folded(thing, screen.width) if isinstance(thing, str) else thing)
    print(*map(str.rstrip, drawn.get().split("\n")[:-1][:most]), sep="\n", file=file, flush=True)


def _folded(line: str, width: int) -> str:
    label = re.match(r"! |\S+ {2,}|\S{9} |\s*", line)  # a stage's name has nine columns
    return "\n".join(textwrap.wrap(printable(line), width, subsequent_indent=" " * (label.end() if label else 0),
                                   break_long_words=False, break_on_hyphens=False))


def echo(*lines: str, file: IO[str] | None = None) -> None:
    """Print lines, flushed immediately so that logs and pipes show them. Names and texts in them may be somebody
    else's: `printable`. A terminal shows ALARMS in colour, and long lines broken between words."""
    text = printable("\n".join(lines))
    if (file or sys.stdout).isatty():
        width = shutil.get_terminal_size().columns
        text = "\n".join(line if len(line) <= width else _folded(line, width) for line in text.split("\n"))
    if not can_draw(file or sys.stdout) or not any(word in text for word in ALARMS):
        print(text, file=file, flush=True)
        return
    from rich.text import Text

    coloured = Text(text)
    for word, style in ALARMS.items():
        coloured.highlight_words([word], style)
    draw(coloured, file=file)


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


class LiveLine:
    """One line that shows how far something is: on a terminal drawn again in place, with a bar where there is room for
    it; elsewhere printed now and then. What is printed meanwhile appears above.

    Args:
        file: where it is printed, by default to stdout.

    Attributes:
        present: the share that is done, and figures with two spaces between them. Those that do not fit are left out,
            the last first.
    """

    def __init__(self, stage: str, file: IO[str] | None = None) -> None:
        self.stage, self.file = stage, file or sys.stdout
        self.shown = -math.inf
        self.present = 0.0, ""
        self._live: Live | None = None

    def __rich_console__(self, screen: Console, options: ConsoleOptions) -> RenderResult:
        from rich.progress_bar import ProgressBar as Bar
        from rich.text import Text

        share, figures = self.look()
        room = options.max_width - STAGE
        if len(figures) > room:
            figures = figures[:room + 2].rpartition("  ")[0] or figures
        yield Text(f"{self.stage:<9} ", "bold", end="")
        if (width := min(20, (room - len(figures) - 2) // 10 * 10)) > 0:
            yield Bar(1.0, share, width=width, complete_style="cyan", finished_style="green")
            figures = f"  {figures}"
        yield Text(printable(figures), no_wrap=True, overflow="ellipsis", end="")

    def look(self) -> tuple[float, str]:
        """What is shown."""
        return self.present

    def show(self, *, ticking: bool = False) -> None:
        """Show what is done, the first time at once and then now and then. ticking: a thread does, too."""
        now = time.monotonic()
        if now - self.shown < (LIVE_S if self._live else PLAIN_S):
            return
        self.shown = now
        if self._live:
            self._live.refresh()
        elif can_draw(self.file):
            from rich.live import Live

            screen = screen_of(self.file)
            # A process that is killed could not show the cursor again.
            screen.show_cursor = lambda show=True: False  # type: ignore[method-assign]
            self._live = Live(self, console=screen, auto_refresh=ticking, transient=True)
            self._live.start(refresh=True)
        else:
            echo(f"{self.stage:<9} {self.look()[1]}", file=self.file)

    def close(self) -> None:
        """Remove it from the terminal."""
        if self._live:
            self._live.update("")
            self._live.stop()


class ProgressBar(LiveLine):
    """`label: done/total unit  ETA  rate` as a live line; at the end in how much time, unless it is `transient`.

    Attributes:
        so_far: what is known of the first units before one is done, with two spaces before it.
    """

    def __init__(self, stage: str, label: str, total: int, unit: str, file: IO[str] | None = None, *,
                 transient: bool = False) -> None:
        super().__init__(stage, file)
        self.transient = transient
        self.label, self.total, self.unit = label, total, unit
        self.done, self.first = 0, 0
        self.so_far: Callable[[], str] = str

    def __enter__(self) -> ProgressBar:
        self.start = time.monotonic()
        if can_draw(self.file):
            self.show(ticking=True)
        self.shown = self.start
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close()
        if kind is None and self.total and not self.transient:
            echo(f"{self.stage:<9} {self._counted} in {duration(self._elapsed_s)}", file=self.file)

    @property
    def _counted(self) -> str:
        return f"{self.label}: {self.done}/{self.total} {self.unit}"

    @property
    def _elapsed_s(self) -> float:
        return max(1e-9, time.monotonic() - self.start)

    @property
    def left_s(self) -> float:
        """Estimated seconds to the end, at the rate since the start. Something must have been done."""
        return (self.total - self.done) * self._elapsed_s / (self.done - self.first)

    def look(self) -> tuple[float, str]:
        """What is shown."""
        made = self.done - self.first
        rate = made / self._elapsed_s
        speed = f"{rate:.1f}/s" if rate >= 0.1 else f"{60 * rate:.2g}/min"
        pace = f"{duration(self.left_s)} to go  {speed}" if made else duration(self._elapsed_s)
        pace += "" if self.done else self.so_far()
        return self.done / max(1, self.total), f"{self._counted}  {pace}"

    def already(self, count: int) -> None:
        """Count work that an earlier, interrupted run finished; it is not part of the rate."""
        self.done = self.first = count

    def advance(self, units: int = 1) -> None:
        """Count finished units and occasionally show the progress."""
        self.done += units
        if self.done < self.total:
            self.show()


def watch_of(stage: str, label: str, file: IO[str], unit: str = "batches") -> Watch:
    """A `Watch` with a progress bar on `file`, of which nothing stays."""
    def watched(batches: Any) -> Iterator[Any]:
        with ProgressBar(stage, label, len(batches), unit, file, transient=True) as progress:
            for batch in batches:
                yield batch
                progress.advance()
    return watched


def number_ranges(ranks: Sequence[int]) -> str:
    """Ascending numbers, such as ranks, in short: 0-2, 5."""
    result = []
    for _, group in groupby(enumerate(ranks), key=lambda pair: pair[1] - pair[0]):
        run = [number for _, number in group]
        result.append(f"{run[0]}" if len(run) == 1 else f"{run[0]}-{run[-1]}")
    return ", ".join(result)


def counted(number: int, word: str) -> str:
    """A number with its noun: 1 rank, 2 ranks."""
    return f"{number:,} {word}{'' if number == 1 else 's'}"


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


def table(rows: Sequence[Sequence[str]], numbers: Container[str] = (), styles: Sequence[str] = ()) -> Table:
    """A table to `draw`, without columns that are empty. Where it is too wide, texts are folded, if possible not in
    words.

    Args:
        rows: the first is the heading.
        numbers: headings of columns that are aligned to the right and never folded.
        styles: of the other rows.
    """
    from rich.table import Table
    from rich.text import Text

    result = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold", row_styles=styles)
    columns = [column for column in zip(*rows, strict=True) if any(column[1:]) or len(rows) == 1]
    for heading, *cells in columns:
        words = [len(word) for cell in cells for word in cell.split()]
        result.add_column(heading, justify="right" if heading in numbers else "left", no_wrap=heading in numbers,
                          overflow="fold", min_width=min(12, max(words, default=0)))
    for row in zip(*(column[1:] for column in columns), strict=True):
        result.add_row(*(Text(printable(cell)) for cell in row))
    return result


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
OF_WEIGHTS = ("config.json", "index.json", ".metadata")
"""A folder of weights contains one of these: Hugging Face's form, ours, torch's."""
INTERRUPTED = 130


def complain(text: str) -> None:
    """Print an error for the user."""
    sys.stdout.flush()
    echo(f"error: {text}", file=sys.stderr)


class Parser(argparse.ArgumentParser):
    """argparse's parser. It names all unknown options at once, each with the option that was meant.

    instead: what an unknown option means that is none, as advice or ""; it gets the option and the words after it.
    """

    instead: Callable[[Sequence[str]], str] = staticmethod(lambda words: "")

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
        bare = {f"--{one.dest}": f"give {one.metavar} without --{one.dest}." for one in self._actions
                if not one.option_strings}
        unknown = [] if self._subparsers else [
            f"there is no option {name}; " + (self.instead(options[number:]) or bare.get(name) or meant(
                name, known, f"{self.prog} --help shows all."))
            for number, word in enumerate(options) if word.startswith("--") and " " not in word
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
        width = min(120, shutil.get_terminal_size().columns - 2)
        doc = re.sub(r"(?m)^\S.*(\n\S.*)*", lambda part: textwrap.fill(part[0], width), self.doc or "")
        parser = Parser(prog=name or self.name, description=doc,
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


def find_run(text: str, otherwise: str = "") -> Path:
    """The folder of a run, from its path or its name; UserError if there is none. otherwise: what may be given too."""
    for folder in (Path(text), Path(RUNS) / text):
        if is_run(folder):
            return folder if folder.name else folder.resolve()  # for `.`: the folder's name is the run's name
    known = [*map(name_of, runs_in(Path(RUNS)))]
    close = meant(text, known)
    raise UserError(f"There is no run {text}{f'; {close}' if close else '.'} The runs in {RUNS} are: "
                    f"{', '.join(known) or 'none'}.{otherwise}")


def find_model(text: str) -> Path:
    """The path of weights, or the folder of a run by its name. A name has no slash. A folder of text with the same name
    as a run is not meant. UserError if there is nothing with this name."""
    path, named = Path(text), Path(RUNS) / text
    if "/" in text:
        return path
    if not path.exists():
        return find_run(text, " Weights are also read from a training checkpoint, a folder in Hugging Face's form "
                              "(config.json), or the Hub by name (owner/name).")
    weights = is_run(path) or any((path / name).is_file() for name in OF_WEIGHTS)
    return named if is_run(named) and not weights else path


def runs_in(folder: Path) -> list[Path]:
    """The runs in a folder, and those of sweeps in it, by name."""
    return sorted(run for one in folder.glob("*") for run in ([one] if is_run(one) else one.glob("*")) if is_run(run))


def name_of(run: Path) -> str:
    """What commands take for the run in a folder."""
    return str(run).removeprefix(f"{RUNS}/")


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
