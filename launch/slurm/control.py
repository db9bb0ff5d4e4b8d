"""Commands for a submitted run: cancel it, stop its training, read its logs."""

from __future__ import annotations

import re
import sys
import time
from codecs import getincrementaldecoder
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import IO, Any

from drover.launch.run_status.run_files import read_run
from drover.launch.run_status.run_status import FINISHED, SILENT, go_on
from drover.launch.slurm.chain import in_queue
from drover.launch.slurm.scheduler import Scheduler
from drover.launch.slurm.start_logs import last_lines, output, rank_log, skip
from drover.launch.status import look, show
from drover.pipeline.contract.stages import STAGES
from drover.pipeline.contract.state import STOP, read_attempts
from drover.pipeline.core.command_line import in_colour
from drover.pipeline.core.console import echo, readable
from drover.pipeline.core.errors import UserError, printable
from drover.pipeline.core.files import Record, opened, read_bytes, write_text

POLL_S = 0.5
SHOWN, LINES = 10, 10
"""Starts of a stage, and lines of each, that `why` shows."""
UNKNOWN_END = {"status": "it runs, or nothing is known of its end"}


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
    echo(f"finished stages are kept; to continue: {go_on(files)}" if queued else
         f"no job of {run_folder} is in the queue")
    return 0


def stop(run_folder: Path, scheduler: Scheduler | None = None) -> int:
    """Ask training to save and end, through the stop file; the exit status."""
    standing, = look([run_folder], scheduler or Scheduler())
    row = next(row for row in standing.rows if row.stage == "train")
    said, silent = standing.files.stages["train"].state, SILENT in standing.remarks
    waits = row.state == "waiting" and not silent
    if row.state not in ("running", "waiting") or (waits and (said is None or said.job != row.job)):
        echo(f"training of {run_folder} does not run (it is: {row.state}), so there is nothing to stop")
        if waits:
            echo(f"`drover cancel {run_folder}` removes it from the queue")
        return 0
    write_text(run_folder / STOP, "drover stop\n")
    if silent:
        echo("Slurm does not answer, so training may not be running", file=sys.stderr)
    echo(f"training{f' (job {row.job})' if row.job else ''} will stop "
         f"{'when its job starts again' if waits else 'after its current step'}: it saves a checkpoint and ends, and "
         f"the stages after it do not start.\nThe request is the file {run_folder / STOP}. To withdraw it, delete the "
         f"file before training sees it.\nto continue: {go_on(standing.files)}")
    return 0


def logs(run_folder: Path, stage: str, rank: int = 0, follow: bool = False) -> int:
    """Print the output of a rank in a stage's newest start; the exit status. follow: continue as it grows, also over
    restarts, until Ctrl-C.

    Raises:
        UserError: there is no such log. The error names those that exist.
    """
    if stage not in STAGES:
        raise UserError(f"There is no stage {stage}. The stages are {', '.join(STAGES)}.")
    shown, file = Path(), None
    with ExitStack() as closing:
        try:
            while True:
                start = next((event for event in reversed(read_attempts(run_folder))
                              if _is_start(event) and event["stage"] == stage), None)
                path = rank_log(_folder(run_folder, start), rank, _ranks_per_node(start)) if start else shown
                if file is not None:
                    _print(file, rank)  # the rest of an earlier start
                if path != shown and path.is_file():
                    shown, file = path, closing.enter_context(opened(path))
                    echo(f"==> {path} <==")
                    if (left_out := skip(file)):
                        echo(f"The first {readable(left_out)} are left out.")
                    _print(file, rank)
                if not follow:
                    if file is None:
                        raise UserError(_absent(run_folder, stage, rank, start))
                    return 0
                time.sleep(POLL_S)
        except KeyboardInterrupt:
            echo()
            return 130


def why(run_folder: Path, scheduler: Scheduler | None = None) -> int:
    """Print the run's status, and how each start of the newest submission ended that did not end well, with its last
    lines, for stages that are not done; the exit status."""
    standing, = look([run_folder], scheduler or Scheduler())
    print(*show(standing, in_colour(sys.stdout)), sep="\n")
    files, events = standing.files, read_attempts(run_folder)
    chain = files.chain.id if files.chain else events[-1].get("chain") if events else None
    ends = {_identity(event): event for event in events if event["event"] == "ended"}
    starts = [event for event in events if _is_start(event) and event.get("chain") == chain]
    for row in standing.rows:
        if row.state in FINISHED:
            continue
        own = [event for event in starts if event["stage"] == row.stage]
        bad = [event for event in own if ends.get(_identity(event), {}).get("status") != "done"]  # elements may be done
        if len(bad) > SHOWN:
            echo(f"\n{row.stage}: {len(bad) - SHOWN} earlier starts, in {run_folder / 'logs' / row.stage}")
        for event in bad[-SHOWN:]:
            _print_start(run_folder, event, ends.get(_identity(event), UNKNOWN_END))
        jobs_with_start = {event["job"].partition("_")[0] for event in own}
        for job in files.jobs(row.stage):
            if job.id not in jobs_with_start:
                for log in sorted(Path(job.log).parent.glob(Path(job.log).name.replace("%a", "*"))):
                    _print_end(f"{row.stage}, job {job.id}, without a start", log)
    if not files.chain and not starts:
        _print_end("the launcher on this machine", run_folder / "logs" / "local.log")
    return 0


def _print_start(run_folder: Path, start: Record, end: Record) -> None:
    """Print how a start ended, with the last lines of the rank that its reason names, or of the first."""
    how = ": ".join(str(end[name]) for name in ("status", "reason") if end.get(name))
    rank, folder = re.search(r"\branks? (\d+)", str(end.get("reason"))), _folder(run_folder, start)
    lines = last_lines(folder, int(rank[1]) if rank else 0, _ranks_per_node(start), LINES)
    echo(f"\n{start['stage']}, job {start['job']}, start {start['start']}, at {start['at'][:16]} UTC on "
         f"{', '.join(start['nodes'])}: {how}", *(f"    {line}" for line in lines or [f"no log is in {folder}"]))


def _print_end(what: str, log: Path) -> None:
    with suppress(OSError):
        lines = read_bytes(log).decode(errors="replace").splitlines()[-LINES:]
        echo(f"\n{what}: {log}", *(f"    {line}" for line in lines))


def _is_start(event: Record) -> bool:
    """Whether an event is the start of a stage, on nodes and with ranks that it names."""
    return event["event"] == "attempt" and bool(event.get("nodes")) and "ranks" in event


def _identity(event: Record) -> tuple[Any, ...]:
    """Of the start that an event belongs to."""
    return event["job"], event.get("restart"), event["start"], event["stage"]


def _folder(run_folder: Path, start: Record) -> Path:
    return run_folder / "logs" / start["stage"] / f"{start['job']}.{start['start']}"


def _ranks_per_node(start: Record) -> int:
    return max(1, start["ranks"] // len(start["nodes"]))


def _print(file: IO[bytes], rank: int) -> None:
    decode = getincrementaldecoder("utf-8")("backslashreplace").decode
    for piece in output(file, rank):
        sys.stdout.write(printable(decode(piece).replace("\r\n", "\n").replace("\r", "\n")))
    sys.stdout.write(printable(decode(b"", final=True)))
    sys.stdout.flush()


def _absent(run_folder: Path, stage: str, rank: int, start: Record | None) -> str:
    text = f"There is no log of rank {rank} of {stage} in {run_folder}."
    if start:
        return f"{text} Its newest start ({start['job']}.{start['start']}) has ranks 0-{start['ranks'] - 1}."
    jobs = [job.log for job in read_run(run_folder).jobs(stage) if Path(job.log.replace("%a", "0")).is_file()]
    return f"{text} The stage has not started" + (f". Read its job's log, {jobs[-1]}" if jobs else ".")
