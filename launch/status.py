"""Show the progress of all runs, a line each, or of one run, as a table of its stages.

    drover status                      every run under runs/
    drover status demo                 one run, its stages
    drover status runs/demo --watch    redrawn until the chain has ended

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
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from operator import attrgetter
from textwrap import shorten
from typing import TYPE_CHECKING

from drover.launch.run_status import FINISHED, SILENT, RunStatus, StageRow, judge, read_run
from drover.launch.slurm.scheduler import Scheduler
from drover.pipeline.config.kinds import add_plugin_option
from drover.pipeline.core.console import (
    RUNS,
    Parser,
    Program,
    add_json,
    draw,
    find_run,
    is_run,
    name_of,
    runs_in,
    screen_of,
    table,
)
from drover.pipeline.core.errors import UserError

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

WATCH_S = 5.0
LONGEST = 1600
"""Characters of a remark that are shown."""
HEADING = ("stage", "state", "job", "elapsed", "progress", "left")
"""Other figures of a stage follow in a line below the table."""
CELLS = attrgetter(*HEADING)
NUMBERS = ("elapsed", "left")
COLOURS = {"running": "cyan", "waiting": "cyan", "ending": "yellow", "failed": "red", "cancelled": "yellow",
           "stopped": "yellow", "done": "green", "reused": "green", "to do": ""}


def add_options(parser: Parser) -> None:
    """The options."""
    parser.add_argument("named", nargs="?", metavar="RUN", help="a run's name (demo) or folder (runs/demo); --run RUN "
                        "is the same. A folder of runs: all of them. Without one: all of runs/")
    parser.add_argument("--run", metavar="RUN", help=argparse.SUPPRESS)
    parser.add_argument("--watch", action="store_true", help="show it again every 5 seconds")
    add_json(parser)
    add_plugin_option(parser)


def work(options: argparse.Namespace) -> int:
    """Show the run or the runs."""
    run = options.named or options.run
    several = runs_in(Path(run or RUNS))
    if run and several and not is_run(Path(run)):
        run = None
    folders = [find_run(run)] if run else several
    if options.watch:
        if run is None:
            raise UserError("--watch follows one run. Name the run.")
        return watch(folders[0])
    seen = query(folders, Scheduler())
    if options.json:
        print(json.dumps([{"run": str(one.files.folder), "outcome": one.outcome, "remarks": one.remarks,
                           "stages": [asdict(row) for row in one.rows]} for one in seen], indent=1))
    else:
        draw(*(show(seen[0]) if run else overview(seen) if seen else [f"no runs in {RUNS}"]))
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
        screen = screen_of(sys.stdout)
        screen.clear()
        draw(f"{time.strftime('%H:%M:%S')}, every {WATCH_S:g} s, Ctrl-C ends this", *show(status),
             most=screen.height - 1 if screen.is_terminal else None)  # a line too many would scroll the table away
        ended = ended + 1 if status.outcome else 0
        if ended == 2:  # between two stages nothing runs for a moment
            return 0 if status.outcome == "done" else 1
        time.sleep(WATCH_S)


def show(status: RunStatus) -> list[RenderableType]:
    """The run, to be drawn: a table of the stages, their other figures, and remarks."""
    chain = status.files.chain
    title = f"run       {status.files.folder}"
    if chain:
        title += f", submitted {chain.submitted[:16]} UTC from commit {str(chain.git.get('commit', 'unknown'))[:10]}"
        title += " with changes" * bool(chain.git.get("changed"))
    return [title, "", _table(HEADING, map(CELLS, status.rows), status.rows),
            *(f"{row.stage:<9} {row.figures}" for row in status.rows if row.figures),
            *(line for remark in status.remarks for line in ("", f"! {shorten(remark, LONGEST, placeholder=' ...')}"))]


def overview(runs: list[RunStatus]) -> list[RenderableType]:
    """A line for each run, at least one, with its current stage."""
    cells = ((name_of(run.files.folder), f"{sum(row.state in FINISHED for row in run.rows)}/{len(run.rows)}",
              *CELLS(run.current)) for run in runs)
    return [*([SILENT] * (SILENT in runs[0].remarks)),
            _table(("run", "done", *HEADING), cells, [run.current for run in runs])]


def _table(heading: Sequence[str], cells: Iterable[Sequence[str]], rows: Sequence[StageRow]) -> Table:
    """A table in the colours of the rows' states."""
    return table([heading, *cells], NUMBERS, [COLOURS[row.state] for row in rows])


main = Program("python launch/status.py", __doc__, add_options, work, interrupted="")

if __name__ == "__main__":
    sys.exit(main())
