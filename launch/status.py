"""Show how runs stand: all of them in a line each, or one as a table of its stages.

    python launch/status.py --run runs/demo --watch
"""

from __future__ import annotations

import sys
from pathlib import Path

if __package__ in (None, ""):  # run as a script: find the packages, and shadow no library with a file beside this one
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import argparse
import os
import shutil
import textwrap
import time
from collections.abc import Sequence

from launch.run_status.run_files import read_run
from launch.run_status.run_status import RunStatus, judge, targets_of, wanted_ids
from launch.run_status.stage_status import BAD, LIVE, Row
from launch.slurm.scheduler import Scheduler
from pipeline.console import duration, printable
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
HEADINGS = ("stage", "state", "job", "nodes", "elapsed", "progress", "ETA", "loss", "tokens/s", "restarts", "goodput")
NUMBERS = ("elapsed", "ETA", "loss", "tokens/s", "restarts", "goodput")
FOLDED = (("goodput", "restarts", "tokens/s", "loss"), ("nodes",), ("ETA",), ("job",))
"""Columns that go to lines of their own where the table is too wide, those of a group together."""
COLOURS = {**dict.fromkeys(LIVE, "36"), **dict.fromkeys(BAD, "31"), "stopped": "33", "done": "32", "reused": "32"}
LONGEST = 700
"""Characters of a remark."""
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
        print("\n".join(show(look(folder, Scheduler()), width(), colour=sys.stdout.isatty())))
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


def look(folder: Path, scheduler: Scheduler) -> RunStatus:
    """How the run stands now."""
    jobs = scheduler.jobs(wanted_ids(read_run(folder)))
    # Read again: a job that ended since would have left the queue, and its last word would not have been seen.
    return judge(read_run(folder), jobs, time.time())


def watch(folder: Path, scheduler: Scheduler, every_s: float) -> int:
    """Show the run again and again, until nothing goes on: 0 if all is done, else 1."""
    live, ended = sys.stdout.isatty(), 0
    while True:
        standing = look(folder, scheduler)
        lines = show(standing, width(), colour=live)
        stamp = time.strftime("%H:%M:%S")
        if live:  # from the top, each line over the old one: nothing flickers
            room = max(10, shutil.get_terminal_size().lines - 1)
            lines = [f"{stamp}, every {every_s:g} s, Ctrl-C ends this", *lines][:room]
            print("\x1b[H" + "".join(f"{line}\x1b[K\n" for line in lines) + "\x1b[J", end="", flush=True)
        else:
            print("\n".join([f"---- {stamp}", *lines]), flush=True)
        # A local chain is quiet between two stages, and Slurm while it hands a job on: look twice.
        ended = ended + 1 if standing.outcome else 0
        if ended >= (1 if standing.outcome == "done" and standing.files.chain else 2):
            return 0 if standing.outcome == "done" else 1
        time.sleep(every_s)


def width() -> int:
    """Columns to fill."""
    if sys.stdout.isatty() or "COLUMNS" in os.environ:
        return shutil.get_terminal_size((WIDTH, 24)).columns
    return WIDTH


def show(standing: RunStatus, columns: int, *, colour: bool = False) -> list[str]:
    """The run as lines: a table of the stages, what of it has no room there, and what needs attention."""
    chain = standing.files.chain
    title = f"run       {standing.files.folder}"
    if chain:
        commit = str(chain.git.get("commit", ""))[:10]
        title += f", submitted {chain.submitted[:16].replace('T', ' ')} UTC"
        title += f" from commit {commit}{' with changes' if chain.git.get('changed') else ''}" if commit else ""
    rows = [_cells(row) for row in standing.rows]
    headings = [name for name in HEADINGS if name in ("stage", "state") or any(row[name] for row in rows)]
    below: list[str] = []
    for group in FOLDED:
        if _needed(rows, headings) <= columns:
            break
        folded = [name for name in headings if name in group]
        headings = [name for name in headings if name not in group]
        below += [f"{row['stage']:<9} {line}" for row in rows
                  if (line := ", ".join(f"{name} {row[name]}" for name in folded if row[name]))]
    lines = [*_wrapped(title, columns), "", *_table(rows, headings, colour)]
    for text in (*below, standing.evaluations):
        lines += _wrapped(text, columns) if text else []
    if standing.remarks:
        lines += ["", *(line for remark in standing.remarks for line in _wrapped(remark, columns, bullet="! "))]
    return lines


def overview(runs_dir: Path, scheduler: Scheduler) -> list[str]:
    """All runs of a folder, a line each."""
    found = [read_run(folder) for folder in _runs(runs_dir)]
    if not found:
        return [f"no runs in {runs_dir}"]
    jobs = scheduler.jobs([id for files in found for id in wanted_ids(files)])
    rows = [_summary(judge(read_run(files.folder), jobs, time.time())) for files in found]
    headings = [name for name in rows[0] if name in ("run", "done", "now") or any(row[name] for row in rows)]
    lines = _table(rows, headings, sys.stdout.isatty())
    return [*lines, "Slurm does not answer: the states are what the files say"] if jobs is None else lines


def _summary(standing: RunStatus) -> dict[str, str]:
    targets, done = targets_of(standing.files), [row.stage for row in standing.rows if row.state in ("done", "reused")]
    row = standing.current
    cells = _cells(row)
    now = "done" if standing.outcome == "done" else f"{cells['stage']} {cells['state']}" if targets else "to do"
    shown = ("job", "progress", "ETA", "loss") if standing.outcome != "done" else ()
    return {"run": printable(standing.files.folder.name), "done": f"{len(done)}/{len({*targets, *done})}", "now": now,
            **{name: cells[name] if name in shown else "" for name in ("job", "progress", "ETA", "loss")}}


def _cells(row: Row) -> dict[str, str]:
    """The row as texts, "" for what is not known."""
    return dict(zip(HEADINGS, map(printable, (
        row.stage, row.state, row.job, row.nodes, _time(row.elapsed_s), row.progress, _time(row.eta_s),
        "" if row.loss is None else f"{row.loss:.4f}",
        "" if row.tokens_per_s is None else f"{row.tokens_per_s:,.0f}",
        str(row.restarts or ""), "" if row.goodput is None else f"{row.goodput:.1%}")), strict=True))


def _time(seconds: float | None) -> str:
    return "" if seconds is None else duration(seconds)


def _needed(rows: Sequence[dict[str, str]], headings: Sequence[str]) -> int:
    return sum(_widths(rows, headings)) + len(GAP) * (len(headings) - 1)


def _widths(rows: Sequence[dict[str, str]], headings: Sequence[str]) -> list[int]:
    return [max(len(name), *(len(row[name]) for row in rows)) for name in headings]


def _table(rows: Sequence[dict[str, str]], headings: Sequence[str], colour: bool) -> list[str]:
    widths = _widths(rows, headings)
    lines = [GAP.join(_coloured(_placed(name, name, room), "1" if colour else "")
                      for name, room in zip(headings, widths, strict=True)).rstrip()]
    for row in rows:
        codes = [COLOURS.get(row[name], "") if colour and name == "state" else "" for name in headings]
        lines.append(GAP.join(_coloured(_placed(name, row[name], room), code) for name, room, code in
                              zip(headings, widths, codes, strict=True)).rstrip())
    return lines


def _placed(heading: str, text: str, room: int) -> str:
    return text.rjust(room) if heading in NUMBERS else text.ljust(room)


def _coloured(text: str, code: str) -> str:
    return f"\x1b[{code}m{text}\x1b[0m" if code else text


def _wrapped(text: str, columns: int, bullet: str = "") -> list[str]:
    text = printable(" ".join(text.split()) if bullet else text)
    text = text if len(text) <= LONGEST else text[:LONGEST] + " ..."
    indent = " " * (len(bullet) or 10)
    return textwrap.wrap(text, max(40, columns), initial_indent=bullet, subsequent_indent=indent,
                         break_long_words=False, break_on_hyphens=False, drop_whitespace=True) or [text]


def _runs(runs_dir: Path) -> list[Path]:
    return sorted(folder for folder in runs_dir.iterdir() if _is_run(folder)) if runs_dir.is_dir() else []


def _is_run(folder: Path) -> bool:
    return (folder / "config.yaml").is_file() or (folder / "launch").is_dir()


if __name__ == "__main__":
    sys.exit(main())
