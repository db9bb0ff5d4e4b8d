"""Show how runs stand: all of them in a line each, or one as a table of its stages.

    python launch/status.py --run runs/demo --watch
"""

from __future__ import annotations

import sys
from pathlib import Path

if __package__ in (None, ""):  # run as a script: find the packages, and shadow no library with a file beside this one
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import argparse
import shutil
import textwrap
import time
from collections.abc import Sequence
from typing import Any

from launch.run_status.run_files import read_run
from launch.run_status.run_status import FINISHED, SILENT, RunStatus, judge, wanted_ids
from launch.slurm.scheduler import Scheduler
from pipeline.console import printable
from pipeline.errors import UserError

EPILOG = """\
examples:
  python launch/status.py                                every run under runs/
  python launch/status.py --run demo                     one run, its stages
  python launch/status.py --run runs/demo --watch        redrawn every 5 seconds, to the end of the chain

What the run's own files say counts first, then squeue, sacct and scontrol. Nothing is written.
Exit status: 0 shown (--watch: all stages are done), 1 with --watch: nothing goes on any more and not all is done,
2 there is no such run, 130 stopped by Ctrl-C.
"""
WIDTH = 100
"""Where the output is no terminal."""
WATCH_S = 5.0
COLUMNS = ("stage", "state", "job", "elapsed", "progress", "left")
"""Of the table. Other figures of a stage are told in a line below it, and nothing makes the table wider than that."""
RIGHT = ("elapsed", "left")
COLOURS = {"running": "36", "waiting": "36", "failed": "31", "stopped": "33", "done": "32", "reused": "32"}
GAP = "  "


def main(arguments: list[str] | None = None) -> int:
    """The command line; the exit status."""
    options = parser().parse_args(arguments)
    try:
        if options.run is None:
            if options.watch is None:
                print("\n".join(overview(Path(options.runs_dir), Scheduler())))
                return 0
            raise UserError("--watch follows one run: name it with --run.")
        folder = find_run(options.run, options.runs_dir)
        if options.watch is not None:
            return watch(folder, Scheduler(), options.watch)
        print("\n".join(show(look([folder], Scheduler())[0], sys.stdout.isatty())))
        return 0
    except UserError as error:
        print(printable(f"drover stops here: {error}"), file=sys.stderr, flush=True)
        return error.exit_status
    except KeyboardInterrupt:
        print()
        return 130
    except BrokenPipeError:  # `| head` has seen enough
        sys.stderr.close()
        return 1


def parser() -> argparse.ArgumentParser:
    """The arguments."""
    result = argparse.ArgumentParser(prog="python launch/status.py", description=(__doc__ or "").splitlines()[0],
                                     epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter)
    result.add_argument("--run", metavar="RUN", help="a run's folder (runs/demo) or name (demo)")
    result.add_argument("--watch", nargs="?", type=float, const=WATCH_S, metavar="SECONDS",
                        help=f"show it again every so many seconds ({WATCH_S:g})")
    result.add_argument("--runs-dir", default="runs", metavar="FOLDER", help="where runs are (default: runs)")
    return result


def find_run(text: str, runs_dir: str = "runs") -> Path:
    """The folder of a run, from its path or its name; UserError if there is none."""
    for folder in (Path(text), Path(runs_dir) / text):
        if _is_run(folder):
            return folder if folder.name else folder.resolve()  # `.`: the run has its folder's name
    known = [folder.name for folder in _runs(Path(runs_dir))]
    raise UserError(f"There is no run {text}. " + (f"The runs in {runs_dir} are: {', '.join(known)}." if known else
                                                   f"There are no runs in {runs_dir} either."))


def look(folders: list[Path], scheduler: Scheduler) -> list[RunStatus]:
    """How runs stand now."""
    jobs = scheduler.jobs([id for folder in folders for id in wanted_ids(read_run(folder))])
    # Read again: a job that ended since would have left the queue, and its last word would not have been seen.
    return [judge(read_run(folder), jobs, time.time()) for folder in folders]


def watch(folder: Path, scheduler: Scheduler, every_s: float) -> int:
    """Show the run again and again, until nothing goes on: 0 if all is done, else 1."""
    live, ended = sys.stdout.isatty(), 0
    while True:
        standing, = look([folder], scheduler)
        lines = [f"{time.strftime('%H:%M:%S')}, every {every_s:g} s, Ctrl-C ends this", *show(standing, live)]
        if live:  # from the top, each line over the old one: nothing flickers
            room = max(10, shutil.get_terminal_size().lines - 1)
            lines = ["\x1b[H" + lines[0], *lines[1:room], "\x1b[J"]
        print("\x1b[K\n".join(lines) if live else "\n".join(lines), end="" if live else "\n", flush=True)
        # A local chain is quiet between two stages, and Slurm while it hands a job on: look twice.
        ended = ended + 1 if standing.outcome else 0
        if ended > 1:
            return 0 if standing.outcome == "done" else 1
        time.sleep(every_s)


def show(standing: RunStatus, colour: bool = False, columns: int = 0) -> list[str]:
    """The run as lines: a table of the stages, their other figures, and what needs attention."""
    columns = columns or max(40, shutil.get_terminal_size((WIDTH, 24)).columns)
    chain = standing.files.chain
    title = f"run       {standing.files.folder}"
    if chain:
        commit = str(chain.git.get("commit", ""))[:10]
        title += f", submitted {chain.submitted[:16].replace('T', ' ')} UTC"
        title += f" from commit {commit}{' with changes' if chain.git.get('changed') else ''}" if commit else ""
    lines = [*_wrapped(title, columns), "", *_table([*map(vars, standing.rows)], COLUMNS, colour)]
    for text in (*(f"{row.stage:<9} {row.figures}" for row in standing.rows if row.figures), standing.evaluations):
        lines += _wrapped(text, columns)
    lines += [""] if standing.remarks else []
    return lines + [line for remark in standing.remarks for line in _wrapped(remark, columns, bullet="! ")]


def overview(runs_dir: Path, scheduler: Scheduler) -> list[str]:
    """All runs of a folder, a line each."""
    found = look(_runs(runs_dir), scheduler)
    if not found:
        return [f"no runs in {runs_dir}"]
    lines = _table([_summary(standing) for standing in found], ("run", "done", *COLUMNS), sys.stdout.isatty())
    return [*lines, SILENT] if SILENT in found[0].remarks else lines


def _summary(standing: RunStatus) -> dict[str, str]:
    """The run as a row: what of it is done, and its stage that says most."""
    done = [row.stage for row in standing.rows if row.state in FINISHED]
    row = {"state": standing.outcome} if standing.outcome == "done" else vars(standing.current)
    return {"run": standing.files.folder.name, "done": f"{len(done)}/{len({*standing.targets, *done})}",
            **{name: row.get(name, "") for name in COLUMNS}}


def _table(rows: list[dict[str, Any]], names: Sequence[str], colour: bool) -> list[str]:
    """Rows under their headings, without columns in which there is nothing."""
    names = [name for name in names if any(row[name] for row in rows)]
    cells = [names, *([printable(row[name]) for name in names] for row in rows)]
    rooms = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = [GAP.join(text.rjust(room) if name in RIGHT else text.ljust(room)
                      for name, text, room in zip(names, line, rooms, strict=True)).rstrip() for line in cells]
    if colour:
        codes = ["1", *(COLOURS.get(row["state"], "0") for row in rows)]
        lines = [f"\x1b[{code}m{line}\x1b[0m" for code, line in zip(codes, lines, strict=True)]
    return lines


def _wrapped(text: str, columns: int, bullet: str = "") -> list[str]:
    return textwrap.wrap(printable(text), columns, initial_indent=bullet, subsequent_indent=" " * (len(bullet) or 10),
                         max_lines=8, placeholder=" ...", break_long_words=False, break_on_hyphens=False)


def _runs(runs_dir: Path) -> list[Path]:
    return sorted(folder for folder in runs_dir.iterdir() if _is_run(folder)) if runs_dir.is_dir() else []


def _is_run(folder: Path) -> bool:
    return (folder / "config.yaml").is_file() or (folder / "launch").is_dir()


if __name__ == "__main__":
    sys.exit(main())
