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

from drover.launch.run_status import FINISHED, SILENT, RunStatus, judge, read_run
from drover.launch.slurm.scheduler import Scheduler
from drover.pipeline.core.console import (
    RUNS,
    Parser,
    Program,
    add_json,
    find_run,
    in_colour,
    is_run,
    printable,
    runs_in,
)
from drover.pipeline.core.errors import UserError

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
                        "is the same. A folder of runs: all of them. Without one: all of runs/")
    parser.add_argument("--run", metavar="RUN", help=argparse.SUPPRESS)
    parser.add_argument("--watch", action="store_true", help="show it again every 5 seconds")
    add_json(parser)


def work(options: argparse.Namespace) -> int:
    """Show the run or the runs."""
    run = options.named or options.run
    several = runs_in(Path(run or RUNS))
    if run and several and not is_run(Path(run)):
        run = None
    folders = [find_run(run)] if run else several
    if options.watch and run is None:
        raise UserError("--watch follows one run. Name the run.")
    if options.watch:
        return watch(folders[0])
    seen = query(folders, Scheduler())
    if options.json:
        print(json.dumps([{"run": str(one.files.folder), "outcome": one.outcome, "remarks": one.remarks,
                           "stages": [asdict(row) for row in one.rows]} for one in seen], indent=1))
    else:
        print(*(show(seen[0]) if run else overview(seen) if seen else [f"no runs in {RUNS}"]), sep="\n")
    return 0


def query(folders: list[Path], scheduler: Scheduler) -> list[RunStatus]:
    """The present status of runs."""
    jobs = scheduler.jobs([id for folder in folders for id in read_run(folder).wanted_ids])
    # Read again: a job may have ended in between, and left the queue and its final status.
    return [judge(read_run(folder), jobs, time.time()) for folder in folders]


def watch(folder: Path) -> int:
    """Show the run again and again until nothing continues; then 0 if all is done, else 1."""
    ended = 0
    while True:
        status, = query([folder], Scheduler())
        lines = [f"{time.strftime('%H:%M:%S')}, every {WATCH_S:g} s, Ctrl-C ends this", *show(status)]
        if sys.stdout.isatty():  # a line too many would scroll the table away
            lines = ["\x1b[H\x1b[2J" + "\n".join(lines[:shutil.get_terminal_size().lines - 2])]
        print(*lines, sep="\n", flush=True)
        ended = ended + 1 if status.outcome else 0
        if ended == 2:  # between two stages nothing runs for a moment
            return 0 if status.outcome == "done" else 1
        time.sleep(WATCH_S)


def show(status: RunStatus) -> list[str]:
    """The run as lines: a table of the stages, their other figures, and remarks."""
    chain = status.files.chain
    title = f"run       {status.files.folder}"
    if chain:
        title += f", submitted {chain.submitted[:16]} UTC from commit {str(chain.git.get('commit', 'unknown'))[:10]}"
        title += " with changes" * bool(chain.git.get("changed"))
    return [*_wrapped(title), "", *map(_line, [HEADING, *map(vars, status.rows)]),
            *(line for row in status.rows if row.figures for line in _wrapped(f"{row.stage:<9} {row.figures}")),
            *(line for remark in status.remarks for line in ["", *_wrapped(remark, "! ")])]


def overview(runs: list[RunStatus]) -> list[str]:
    """A line for each run, at least one, with its current stage."""
    lines = [SILENT] * (SILENT in runs[0].remarks) + [_line(HEADING, f"{'run':<16} {'done':<6}")]
    for run in runs:
        done = f"{sum(row.state in FINISHED for row in run.rows)}/{len(run.rows)}"
        lines.append(_line(vars(run.current), f"{run.files.folder.name:<16} {done:<6}"))
    return lines


def _line(cells: Mapping[str, str], before: str = "") -> str:
    line = printable(before + LINE.format(**cells)).rstrip()
    return f"\x1b[{COLOURS.get(cells['state'], '1')}m{line}\x1b[0m" if in_colour(sys.stdout) else line


def _wrapped(text: str, bullet: str = "") -> list[str]:
    columns = max(40, shutil.get_terminal_size((WIDTH, 24)).columns)
    return textwrap.wrap(printable(text), columns, initial_indent=bullet, subsequent_indent=" " * (len(bullet) or 10),
                         max_lines=16, placeholder=" ...", break_long_words=False, break_on_hyphens=False)


main = Program("python launch/status.py", __doc__, add_options, work, interrupted="")

if __name__ == "__main__":
    sys.exit(main())
