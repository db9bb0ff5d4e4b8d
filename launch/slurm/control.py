"""What a user does to a run that was submitted: cancel it, stop its training, read its logs."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import IO, Any, NoReturn

from launch.run_status.run_files import RunFiles, read_run
from launch.run_status.run_status import go_on, judge, wanted_ids
from launch.slurm.chain import ChainJob, read_chains, unrecorded
from launch.slurm.scheduler import JobInfo, Scheduler
from launch.slurm.start_logs import output, rank_log
from pipeline.console import spelled
from pipeline.contract.stages import STAGES
from pipeline.contract.state import STOP, read_attempts
from pipeline.errors import UserError
from pipeline.files import write_text

POLL_S = 0.5


def cancel(run_folder: Path, scheduler: Scheduler | None = None) -> int:
    """Cancel what is in the queue of the run, the newest submission and the last of its chain first; the exit status.

    In this order no job's end lets another one start. Evaluations of checkpoints go last: while training runs, it would
    submit them again.
    """
    scheduler = scheduler or Scheduler()
    files = read_run(run_folder)
    if files.chain is None:
        print(f"nothing of {run_folder} was submitted to Slurm, so there is nothing to cancel")
        return 0
    chain = _cancel(run_folder, scheduler, evaluations=False)
    beside = None if chain is None else _cancel(run_folder, scheduler, evaluations=True)
    if chain is None or beside is None:
        return 1
    if not chain + beside:
        print(f"nothing of {run_folder} is in the queue any more")
        return 0
    print(f"what is finished is kept; to go on: {go_on(files)}")
    return 0


def _cancel(run_folder: Path, scheduler: Scheduler, evaluations: bool) -> int | None:
    """How many jobs, evaluations or others, were cancelled; None if one could not be."""
    chains, mine = list(reversed(read_chains(run_folder))), scheduler.mine()
    # Of a submission that was killed before it could record a job, that job is the last.
    lost = [ChainJob(job.name, "", "evaluation" if "-evaluate-step-" in job.name else "job", job.id)
            for job in unrecorded(chains, mine or ())]
    jobs = [job for job in (*lost, *(job for chain in chains for job in reversed(chain.jobs)))
            if (job.kind == "evaluation") == evaluations]
    known = scheduler.jobs([job.id for job in jobs])
    if known is None or mine is None:
        print("Slurm does not say what is in the queue, so every job of the chain is cancelled", file=sys.stderr)
        known = {job.id: JobInfo(job.id, "PENDING") for job in jobs}
    queued = [job for job in jobs if known[job.id].queued]
    for job in queued:
        if problem := scheduler.cancel([job.id]):
            print(f"{job.name} was not cancelled: {problem}\nWhat comes before it in the chain was left alone; try "
                  f"again: python launch/submit.py --cancel {run_folder}", file=sys.stderr, flush=True)
            return None
        print(f"cancelled {job.id} ({job.name})", flush=True)
    return len(queued)


def stop(run_folder: Path, reason: str = "", scheduler: Scheduler | None = None) -> int:
    """Ask training to save and leave, through the stop file; the exit status."""
    files = read_run(run_folder)
    jobs = (scheduler or Scheduler()).jobs(wanted_ids(files))
    row = next(row for row in judge(files, jobs, time.time()).rows if row.stage == "train")
    said = files.stages["train"].state
    requeued = row.state == "waiting" and (jobs is None or (said is not None and said.job == row.job))
    if row.state != "running" and not requeued:
        print(f"training of {run_folder} does not run (it is: {row.state}), so there is nothing to stop")
        if row.state == "waiting":
            print(f"python launch/submit.py --cancel {run_folder} takes it out of the queue")
        return 0
    write_text(run_folder / STOP, f"{reason or 'asked for by the user'}\n")
    if jobs is None:
        print("Slurm does not answer, so it is not sure that training runs", file=sys.stderr)
    job = f" (job {row.job})" if row.job else ""
    when = "when its job starts again" if requeued and jobs is not None else "after the step that it is in"
    print(f"training{job} will stop {when}: it saves a checkpoint and leaves, and what depends on it does not start.\n"
          f"The request is the file {run_folder / STOP}; deleting it before training has seen it takes it back.\n"
          f"to go on: {go_on(files)}")
    return 0


def logs(run_folder: Path, stage: str, rank: int = 0, follow: bool = False,
         start: str | None = None) -> int:
    """Print a stage's newest log, or that of a `start` (`12.1`); the exit status.

    Of a Slurm job: what the rank wrote; with `follow` as it grows, also over restarts, until Ctrl-C.

    Raises:
        UserError: there is no such log; says which there are.
    """
    if stage not in STAGES:
        raise UserError(f"There is no stage {stage}. The stages are {', '.join(STAGES)}.")
    found = _file(run_folder, stage, rank, start)
    if found is None and not (follow and start is None):
        raise UserError(_absent(run_folder, stage, rank, start))
    try:
        if follow:
            _follow(run_folder, stage, rank, start)
        if found is not None:
            print(f"==> {found} <==", flush=True)
            with open(found, "rb") as file:
                sys.stdout.buffer.writelines(output(file, rank))
                sys.stdout.buffer.flush()
    except KeyboardInterrupt:
        print()
        return 130
    return 0


def _file(run_folder: Path, stage: str, rank: int, start: str | None) -> Path | None:
    """The file that the rank's output is in; None if there is none."""
    # `latest` may lead elsewhere a moment later.
    folder = (run_folder / "logs" / stage / (start or "latest")).resolve()
    began = _attempt(run_folder, folder.name) if rank else {}
    path = rank_log(folder, rank, began["ranks"] // len(began["nodes"]) if began else 1)
    return path if path.exists() else None


def _attempt(run_folder: Path, start: str) -> dict[str, Any]:
    """What is recorded of the beginning of a start; {} if nothing is."""
    return next((event for event in read_attempts(run_folder) if event["event"] == "attempt"
                 and f"{event['job']}.{event['start']}" == start), {})


def _absent(run_folder: Path, stage: str, rank: int, start: str | None) -> str:
    folder = run_folder / "logs" / stage
    starts = sorted((path for path in folder.glob("*.*") if path.is_dir() and not path.is_symlink()),
                    key=lambda path: path.stat().st_mtime)
    asked = f"rank {rank} of {stage}" + (f", start {start}" if start else "")
    source = folder / start if start else folder / "latest"
    if source.is_dir():
        ranks = range(_attempt(run_folder, source.resolve().name).get("ranks", 0)) if any(source.glob("*.log")) else ()
        return (f"There is no log of {asked}: {source.resolve()} holds "
                f"{f'the ranks {spelled(ranks)}' if ranks else 'no log yet'}.")
    if starts:
        return f"There is no log of {asked}. There are logs of the starts {', '.join(path.name for path in starts)}."
    text = f"There is no log of {asked} in {run_folder}."
    files: RunFiles = read_run(run_folder)
    jobs = [job.log for job in files.jobs(stage) if job.log and Path(job.log.replace("%a", "0")).is_file()]
    if jobs:
        return f"{text} The stage itself has not started; its job says: {jobs[-1]}"
    others = [name for name in STAGES if (run_folder / "logs" / name / "latest").exists()]
    return f"{text} There are logs of: {', '.join(others) or 'no stage'}."


def _follow(run_folder: Path, stage: str, rank: int, start: str | None) -> NoReturn:
    """Print what is there and what comes, from whichever file is the newest, until Ctrl-C."""
    opened: dict[Path, IO[bytes]] = {}
    last: Path | None = None
    try:
        while True:
            wanted = _file(run_folder, stage, rank, start)
            if wanted is not None and wanted not in opened:
                opened[wanted] = open(wanted, "rb")  # noqa: SIM115 - closed below
            for path, file in list(opened.items()):
                for text in output(file, rank):
                    if path != last:
                        print(f"==> {path} <==", flush=True)
                        last = path
                    sys.stdout.buffer.write(text)
                sys.stdout.buffer.flush()
                if path != wanted:  # of an earlier start, read to its end
                    opened.pop(path).close()
            time.sleep(POLL_S)
    finally:
        for file in opened.values():
            file.close()
