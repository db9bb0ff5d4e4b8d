"""Show the progress of all runs, a line each, or of one run, as a table of its stages.

    drover status                      every run under runs/
    drover status demo                 one run, its stages
    drover status runs/demo --watch    redrawn every 5 seconds, to the end of the chain

`python launch/status.py --run demo` does the same. A run's own files count first, then squeue and sacct. Nothing is
written. Exit status: 0 shown (--watch: all stages are done), 1 with --watch: nothing will continue by itself, and not
all stages are done, 2 there is no such run, 130 stopped by Ctrl-C.
"""

from __future__ import annotations

import sys
from pathlib import Path

if __package__ in (None, ""):  # run as a script: find the packages, and let no file of this folder shadow a library
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import argparse
import json
import shutil
import textwrap
import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from drover.launch.run_status.run_files import read_run
from drover.launch.run_status.run_status import FINISHED, SILENT, RunStatus, judge, wanted_ids
from drover.launch.slurm.scheduler import Scheduler
from drover.pipeline.core.command_line import RUNS, Parser, Program, add_json, find_run, in_colour, runs_in
from drover.pipeline.core.console import printable
from drover.pipeline.core.errors import UserError
from drover.pipeline.core.files import Record

WIDTH = 100
"""Columns, if the output is no terminal."""
WATCH_S = 5.0
LINE = "{stage:<10} {state:<8} {job:<9} {elapsed:>10}  {progress:<24} {left:>9}"
"""A row of the table. Other figures of a stage follow in a line below the table."""
HEADING = {name: name for name in ("stage", "state", "job", "elapsed", "progress", "left")}
COLOURS = {"running": "36", "waiting": "36", "failed": "31", "stopped": "33", "done": "32", "reused": "32",
           "to do": "0"}


def add_options(parser: Parser) -> None:
    """The options."""
    parser.add_argument("named", nargs="?", metavar="RUN", help="a run's name (demo) or folder (runs/demo); --run RUN "
                        "is the same. Without one: all runs")
    parser.add_argument("--run", metavar="RUN", help=argparse.SUPPRESS)
    parser.add_argument("--watch", nargs="?", type=float, const=WATCH_S, metavar="SECONDS",
                        help="show it again every so many seconds (%(const)s)")
    parser.add_argument("--runs-dir", default=RUNS, metavar="FOLDER", help="where runs are (default: runs)")
    add_json(parser)


def work(options: argparse.Namespace) -> int:
    """Show the run or the runs."""
    run = options.named or options.run
    if run is None and options.watch is not None:
        raise UserError("--watch follows one run. Name the run.")
    if options.watch is not None and not options.watch >= 0:
        raise UserError(f"--watch takes seconds, not {options.watch:g}.")
    folders = [find_run(run, options.runs_dir)] if run else runs_in(Path(options.runs_dir))
    if options.json:
        print(json.dumps([as_json(status) for status in query(folders, Scheduler())], indent=1))
        return 0
    if run is None:
        print(*overview(Path(options.runs_dir), Scheduler()), sep="\n")
        return 0
    return watch(folders[0], Scheduler(), options.watch)


def as_json(status: RunStatus) -> Record:
    """A run for programs: its folder, outcome (done, failed, or null while it continues), stages and remarks."""
    return {"run": str(status.files.folder), "outcome": status.outcome, "remarks": status.remarks,
            "stages": [asdict(row) for row in status.rows]}


def query(folders: list[Path], scheduler: Scheduler) -> list[RunStatus]:
    """The present status of runs."""
    jobs = scheduler.jobs([id for folder in folders for id in wanted_ids(read_run(folder))])
    # Read again: a job may have ended in between, and left the queue and its final status.
    return [judge(read_run(folder), jobs, time.time()) for folder in folders]


def watch(folder: Path, scheduler: Scheduler, every_s: float | None) -> int:
    """Show the run every `every_s` seconds until nothing continues; then 0 if all is done, else 1. None: once; 0."""
    ended = 0
    while ended < 2:  # between two stages nothing runs for a moment
        status, = query([folder], scheduler)
        lines = show(status, in_colour(sys.stdout))
        if every_s is None:
            print(*lines, sep="\n")
            return 0
        lines = [f"{time.strftime('%H:%M:%S')}, every {every_s:g} s, Ctrl-C ends this", *lines]
        if sys.stdout.isatty():
            lines = ["\x1b[H\x1b[2J" + "\n".join(lines[:shutil.get_terminal_size().lines - 2])]
        print(*lines, sep="\n", flush=True)
        ended = ended + 1 if status.outcome else 0
        if ended < 2:
            time.sleep(every_s)
    return 0 if status.outcome == "done" else 1


def show(status: RunStatus, colour: bool = False, columns: int = 0) -> list[str]:
    """The run as lines: a table of the stages, their other figures, and remarks."""
    columns = columns or max(40, shutil.get_terminal_size((WIDTH, 24)).columns)
    chain = status.files.chain
    title = f"run       {status.files.folder}"
    if chain:
        title += f", submitted {chain.submitted[:16]} UTC from commit {str(chain.git.get('commit', 'unknown'))[:10]}"
        title += " with changes" * bool(chain.git.get("changed"))
    lines = [*_wrapped(title, columns), "", *(_line(cells, colour) for cells in (HEADING, *map(vars, status.rows)))]
    for row in status.rows:
        lines += _wrapped(f"{row.stage:<9} {row.figures}", columns) if row.figures else []
    return lines + [line for remark in status.remarks for line in ("", *_wrapped(remark, columns, bullet="! "))]


def overview(runs_dir: Path, scheduler: Scheduler) -> list[str]:
    """All runs of a folder, a line each, with each run's current stage."""
    colour = in_colour(sys.stdout)
    runs = query(runs_in(runs_dir), scheduler)
    if not runs:
        return [f"no runs in {runs_dir}"]
    lines = [SILENT] * (SILENT in runs[0].remarks) + [_line(HEADING, colour, f"{'run':<16} {'done':<6}")]
    for run in runs:
        done = f"{sum(row.state in FINISHED for row in run.rows)}/{len(run.rows)}"
        lines.append(_line(vars(run.current), colour, f"{run.files.folder.name:<16} {done:<6}"))
    return lines


def _line(cells: Mapping[str, Any], colour: bool, before: str = "") -> str:
    line = printable(before + LINE.format(**cells)).rstrip()
    return f"\x1b[{COLOURS.get(cells['state'], '1')}m{line}\x1b[0m" if colour else line


def _wrapped(text: str, columns: int, bullet: str = "") -> list[str]:
    return textwrap.wrap(printable(text), columns, initial_indent=bullet, subsequent_indent=" " * (len(bullet) or 10),
                         max_lines=16, placeholder=" ...", break_long_words=False, break_on_hyphens=False)


main = Program("python launch/status.py", __doc__, add_options, work, interrupted="")

if __name__ == "__main__":
    sys.exit(main())
