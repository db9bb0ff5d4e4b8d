"""Commands for a submitted run: cancel it, stop its training, read its logs."""

from __future__ import annotations

import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import IO

from drover.launch.run_status.run_files import read_run
from drover.launch.run_status.run_status import SILENT, go_on
from drover.launch.slurm.chain import in_queue
from drover.launch.slurm.scheduler import Scheduler
from drover.launch.slurm.start_logs import output, rank_log
from drover.launch.status import look
from drover.pipeline.contract.locks import LOCKS, lock
from drover.pipeline.contract.stages import STAGES
from drover.pipeline.contract.state import CANCEL, LAUNCHER, STOP, read_attempts
from drover.pipeline.core.errors import UserError
from drover.pipeline.core.files import Record, opened, write_text

POLL_S = 0.5


def cancel(run_folder: Path, scheduler: Scheduler | None = None) -> int:
    """Cancel the run's queued jobs, those of the newest submission and the last of a chain first; the exit status.

    In this order no job's end lets another one start. Evaluations of checkpoints are cancelled last, because running
    training would submit them again. Their records are read again for the same reason.
    """
    scheduler, files, cancelled = scheduler or Scheduler(), read_run(run_folder), 0
    if _launcher_works(run_folder):
        write_text(run_folder / CANCEL, "drover cancel\n")
        print("asked the launcher of the hosts to end: the stage saves what it can, and nothing after it starts\n"
              f"to continue: {go_on(files)}")
        return 0
    if files.chain is None:
        print(f"{run_folder} was never submitted to Slurm and does not run on hosts, so there is nothing to cancel")
        return 0
    for evaluations in (False, True):
        queued, mine = in_queue(run_folder, scheduler)
        if mine is None:
            print("squeue does not answer, so every job of the chain is cancelled", file=sys.stderr)
        for job in queued:
            if (job.kind == "evaluation") != evaluations:
                continue
            if problem := scheduler.cancel(job.id):
                print(f"{job.name} was not cancelled: {problem}\nThe jobs before it in the chain were left alone. Try "
                      f"again: drover cancel {run_folder}", file=sys.stderr, flush=True)
                return 1
            print(f"cancelled {job.id} ({job.name})", flush=True)
            cancelled += 1
    print(f"finished stages are kept; to continue: {go_on(files)}" if cancelled else
          f"no job of {run_folder} is in the queue")
    return 0


def _launcher_works(run_folder: Path) -> bool:
    """Whether a launcher runs stages on hosts without Slurm."""
    if not (run_folder / LOCKS / LAUNCHER).exists():
        return False
    try:
        lock(run_folder, LAUNCHER).close()
    except UserError:
        return True
    return False


def stop(run_folder: Path, scheduler: Scheduler | None = None) -> int:
    """Ask training to save and end, through the stop file; the exit status."""
    standing, = look([run_folder], scheduler or Scheduler())
    row = next(row for row in standing.rows if row.stage == "train")
    said, silent = standing.files.stages["train"].state, SILENT in standing.remarks
    waits = row.state == "waiting" and not silent
    if row.state not in ("running", "waiting") or (waits and (said is None or said.job != row.job)):
        print(f"training of {run_folder} does not run (it is: {row.state}), so there is nothing to stop")
        if waits:
            print(f"`drover cancel {run_folder}` removes it from the queue")
        return 0
    write_text(run_folder / STOP, "drover stop\n")
    if silent:
        print("Slurm does not answer, so training may not be running", file=sys.stderr)
    print(f"training{f' (job {row.job})' if row.job else ''} will stop "
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
                start = next((event for event in reversed(read_attempts(run_folder)) if event["event"] == "attempt"
                              and event["stage"] == stage and event.get("nodes") and "ranks" in event), None)
                path = shown
                if start:
                    folder = run_folder / "logs" / stage / f"{start['job']}.{start['start']}"
                    path = rank_log(folder, rank, max(1, start["ranks"] // len(start["nodes"])))
                if file is not None:
                    _print(file, rank)  # the rest of an earlier start
                if path != shown and path.is_file():
                    shown, file = path, closing.enter_context(opened(path))
                    print(f"==> {path} <==", flush=True)
                    _print(file, rank)
                if not follow:
                    if file is None:
                        raise UserError(_absent(run_folder, stage, rank, start))
                    return 0
                time.sleep(POLL_S)
        except KeyboardInterrupt:
            print()
            return 130


def _print(file: IO[bytes], rank: int) -> None:
    sys.stdout.buffer.writelines(output(file, rank))
    sys.stdout.buffer.flush()


def _absent(run_folder: Path, stage: str, rank: int, start: Record | None) -> str:
    text = f"There is no log of rank {rank} of {stage} in {run_folder}."
    if start:
        return f"{text} Its newest start ({start['job']}.{start['start']}) has ranks 0-{start['ranks'] - 1}."
    jobs = [job.log for job in read_run(run_folder).jobs(stage) if Path(job.log.replace("%a", "0")).is_file()]
    return f"{text} The stage has not started" + (f". Read its job's log, {jobs[-1]}" if jobs else ".")
