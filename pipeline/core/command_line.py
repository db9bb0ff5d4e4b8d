"""The command line of every program: one parser, one meaning of RUN, one format of errors."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TextIO

from drover.pipeline.core.console import printable
from drover.pipeline.core.errors import UserError, is_full_disk, meant

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


def find_run(text: str, runs: str = RUNS) -> Path:
    """The folder of a run, from its path or its name; UserError if there is none."""
    for folder in (Path(text), Path(runs) / text):
        if is_run(folder):
            return folder if folder.name else folder.resolve()  # for `.`: the folder's name is the run's name
    known = ", ".join(folder.name for folder in runs_in(Path(runs)))
    raise UserError(f"There is no run {text}. The runs in {runs} are: {known or 'none'}.")


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
