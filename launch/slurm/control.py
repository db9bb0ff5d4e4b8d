"""Commands for a submitted run: cancel it, stop its training, read its logs."""

from __future__ import annotations

import re
import sys
import time
from codecs import getincrementaldecoder
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import IO

from drover.launch.run_status.run_files import read_run
from drover.launch.run_status.run_status import FINISHED, SILENT, continue_command
from drover.launch.slurm.chain import in_queue
from drover.launch.slurm.options import FOLDER
from drover.launch.slurm.scheduler import Scheduler
from drover.launch.slurm.start_logs import last_lines, output, rank_log, skip
from drover.launch.status import query, show
from drover.pipeline.contract.stages import STAGES
from drover.pipeline.contract.state import STOP
from drover.pipeline.core.command_line import in_colour
from drover.pipeline.core.console import echo, printable, readable
from drover.pipeline.core.errors import UserError
from drover.pipeline.core.files import opened, read_bytes, write_text
from drover.pipeline.records.metrics import RunFacts, Start

POLL_S = 0.5
SHOWN, LINES = 10, 10
"""Starts of a stage, and lines of each, that `why` shows."""


def cancel(run_folder: Path, scheduler: Scheduler | None = None) -> int:
    """Cancel the run's queued jobs, those of the newest submission and the last of a chain first; the exit status.

    In this order no job's end lets another one start.
    """
    scheduler, files = scheduler or Scheduler(), read_run(run_folder)
    if files.chain is None:
        echo(f"{run_folder} was never submitted to Slurm, so there is nothing to cancel")
        return 0
    queued, mine = in_queue(run_folder, scheduler)
    if mine is None:
        echo("squeue does not answer, so every job of the chain is cancelled", file=sys.stderr)
    for job in queued:
        if problem := scheduler.cancel(job.id):
            echo(f"{job.name} was not cancelled: {problem}\nThe jobs before it in the chain were left alone. Try "
                 f"again: drover cancel {run_folder}", file=sys.stderr)
            return 1
        echo(f"cancelled {job.id} ({job.name})")
    echo(f"finished stages are kept; to continue: {continue_command(files)}" if queued else
         f"no job of {run_folder} is in the queue")
    return 0


def stop(run_folder: Path, scheduler: Scheduler | None = None) -> int:
    """Ask training to save and end, through the stop file; the exit status."""
    status, = query([run_folder], scheduler or Scheduler())
    row = next(row for row in status.rows if row.stage == "train")
    state = status.files.stages["train"].state
    silent = SILENT in status.remarks
    never_ran = row.state == "waiting" and not silent and (state is None or state.job != row.job)
    if row.state not in ("running", "waiting") or never_ran:
        echo(f"training of {run_folder} does not run (it is: {row.state}), so there is nothing to stop",
             *[f"`drover cancel {run_folder}` removes it from the queue"] * never_ran)
        return 0
    write_text(run_folder / STOP, "drover stop\n")
    if silent:
        echo("Slurm does not answer, so training may not be running", file=sys.stderr)
    echo(f"training will stop after its current step, or when its job starts again: it saves a checkpoint and ends; "
         f"the stages after it do not start.\nThe request is the file {run_folder / STOP}. To withdraw it, delete the "
         f"file before training sees it.\nto continue: {continue_command(status.files)}")
    return 0


def logs(run_folder: Path, stage: str, rank: int = 0, follow: bool = False) -> int:
    """Print the output of a rank in a stage's newest start; the exit status. follow: continue as it grows, also over
    restarts, until Ctrl-C.

    Raises:
        UserError: there is no such log.
    """
    if stage not in STAGES:
        raise UserError(f"There is no stage {stage}. The stages are {', '.join(STAGES)}.")
    shown, file = Path(), None
    with ExitStack() as closing, suppress(KeyboardInterrupt):
        while True:
            starts = [start for start in RunFacts(run_folder).starts if start.stage == stage]
            path = rank_log(starts[-1].logs(run_folder), rank, starts[-1].ranks_per_node) if starts else shown
            if file is not None:
                _print(file, rank)  # the rest of an earlier start
            if path != shown and path.is_file():
                shown = path
                file = closing.enter_context(opened(path))
                echo(f"==> {path} <==")
                if skipped := skip(file):
                    echo(f"The first {readable(skipped)} are left out.")
                _print(file, rank)
            if not follow:
                if file is None:
                    has = f"; its newest start has ranks 0-{starts[-1].ranks - 1}" if starts else ""
                    raise UserError(f"There is no log of rank {rank} of {stage} in {run_folder}{has}. `drover why "
                                    f"{run_folder}` shows the logs of its jobs.")
                return 0
            time.sleep(POLL_S)
    echo()
    return 130


def why(run_folder: Path, scheduler: Scheduler | None = None) -> int:
    """Print the run's status, and how each start of the newest submission ended that did not end well, with its last
    lines, for stages that are not done; the exit status."""
    status, = query([run_folder], scheduler or Scheduler())
    print(*show(status, in_colour(sys.stdout)), sep="\n")
    files = status.files
    for row in status.rows:
        starts = files.stages[row.stage].starts
        if row.state in FINISHED:
            continue
        for start in [start for start in starts if start.status != "done"][-SHOWN:]:  # elements may be done
            _print_start(run_folder, start)
        for job in files.jobs(row.stage):
            if not any(start.job.partition("_")[0] == job.id for start in starts):
                for log in sorted((run_folder / FOLDER).glob(f"{job.id}_*log.out")):
                    _print_end(f"{row.stage}, job {job.id}, without a start", log)
    if not files.chain and not any(stage.starts for stage in files.stages.values()):
        _print_end("the launcher on this machine", run_folder / "logs" / "local.log")
    return 0


def _print_start(run_folder: Path, start: Start) -> None:
    """Print how a start ended, with the last lines of the rank that its reason names, or of the first."""
    how = ": ".join(filter(None, (start.status, start.reason))) or "it runs, or nothing is known of its end"
    rank = re.search(r"\branks? (\d+)", start.reason)
    folder = start.logs(run_folder)
    lines = last_lines(folder, int(rank[1]) if rank else 0, start.ranks_per_node, LINES)
    echo(f"\n{start.stage}, job {start.job}, start {start.number}, at {start.at[:16]} UTC on "
         f"{', '.join(start.nodes)}: {how}", *(f"    {line}" for line in lines or [f"no log is in {folder}"]))


def _print_end(what: str, log: Path) -> None:
    with suppress(OSError):
        lines = read_bytes(log).decode(errors="replace").splitlines()[-LINES:]
        echo(f"\n{what}: {log}", *(f"    {line}" for line in lines))


def _print(file: IO[bytes], rank: int) -> None:
    decode = getincrementaldecoder("utf-8")("backslashreplace").decode
    for piece in output(file, rank):
        sys.stdout.write(printable(decode(piece).replace("\r\n", "\n").replace("\r", "\n")))
    sys.stdout.write(printable(decode(b"", final=True)))
    sys.stdout.flush()
