"""The planned stages on this box, one after the other; a stage counts as done when its manifest says so."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from secrets import token_hex
from typing import TextIO

from launch.checks import refuse_stale
from launch.child import Child, Interruptions
from launch.plan import Job, Machine, Options
from pipeline.config.tree import Config
from pipeline.console import duration
from pipeline.contract.entry import INTERRUPTED
from pipeline.contract.run import Run
from pipeline.contract.signed import SECRET
from pipeline.contract.stages import REPOSITORY

SHUTDOWN_S = 600
"""How long ranks may take to save a checkpoint and end (torch's own default is 30 s)."""
PATIENCE_S = 30.0
"""How long a stage without ranks may take to end; it loses at most its unfinished units."""


def log_path(run_folder: Path, stage: str) -> Path:
    """Where a stage's output is kept, of all its attempts on this box."""
    return run_folder / "logs" / f"{stage}.log"


def find_machine() -> Machine:
    """Cores that this process may use and GPUs that it can see, without importing torch."""
    return Machine(len(os.sched_getaffinity(0)), _gpus())


def run_jobs(config: Config, jobs: list[Job], options: Options) -> int:
    """Do the jobs; 0 if at the end all of them are done, else the status of the one that is not."""
    began = time.monotonic()
    with Interruptions() as interruptions:
        for job in jobs:
            status = _run_job(config, job, options, interruptions)
            if status:
                return status
    report = config.folder / "report.html"
    what = f"report: {report}" if jobs[-1].stage == "report" and report.is_file() else f"run folder: {config.folder}"
    _tell(sys.stdout, f"\nall done in {duration(time.monotonic() - began)}; {what}")
    return 0


def _run_job(config: Config, job: Job, options: Options, interruptions: Interruptions) -> int:
    run = Run(config)
    if interruptions.count:
        return _stopped(job, done_before=True)
    state = run.state(job.stage)
    if state.kind == "done" and not job.forced:
        _say_done(run, job.stage)
        return 0
    refuse_stale(run, replace(job, state=state), options)
    log = log_path(run.folder, job.stage)
    status = _start(job, log).run(interruptions, job.stage)
    state = Run(config).state(job.stage)
    if state.kind == "done" and (status == 0 or not job.forced):  # forced: the manifest could be the old one
        if status:
            _tell(sys.stderr, f"{job.stage} had committed its outputs when it ended with {_status_text(status)}, so it "
                              f"is done; see {log}")
        return 0
    if interruptions.count or status == INTERRUPTED:
        return _stopped(job, done_before=False)
    if status == 0:
        _tell(sys.stderr, f"\n{job.stage} ended with exit status 0, but it is not done: {run.own_folder(job.stage)} "
                          f"has no valid manifest (state: {state}). Nothing after it was started. Its output is in "
                          f"{log}.")
        return 1
    _tell(sys.stderr, f"\n{job.stage} failed ({_status_text(status)}). Nothing after it was started. Its output is in "
                      f"{log}. Once the cause is mended, {_same_command(job)}.")
    return status


def _start(job: Job, log: Path) -> Child:
    environment = {**job.environment, **os.environ, **_python_environment(), "DROVER_LAUNCHED": "1"}
    if not job.ranks:
        # SIGTERM, not Ctrl-C's own signal: Python would answer that with a traceback from wherever it is. What such a
        # stage has finished is on disk, and nothing else counts.
        return Child(job.command, environment, log, stop=signal.SIGTERM, orphaned=signal.SIGKILL,
                     patience_s=PATIENCE_S)
    environment |= {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(SHUTDOWN_S), SECRET: token_hex(32)}
    python, *rest = job.command
    command = [python, "-m", "launch.agent", str(log), *rest[rest.index("torch.distributed.run") + 1:]]
    # The agent passes SIGTERM on and waits for its workers, so nothing needs to be sent after it.
    return Child(command, environment, log, stop=signal.SIGTERM, orphaned=signal.SIGTERM, patience_s=SHUTDOWN_S)


def _python_environment() -> dict[str, str]:
    """Children import this checkout and nothing from the folder they run in, and hide no output."""
    inherited = os.environ.get("PYTHONPATH")
    return {"PYTHONPATH": os.pathsep.join([str(REPOSITORY), *([inherited] if inherited else [])]),
            "PYTHONSAFEPATH": "1", "PYTHONUNBUFFERED": "1"}


def _say_done(run: Run, stage: str) -> None:
    origin = f", reused from {run.stage_folder(stage)}" if run.is_reused(stage) else ""
    _tell(sys.stdout, f"{stage:<9} up to date{origin}")
    if changed := run.changed_code(stage):
        _tell(sys.stdout, f"{stage:<9} warning: made by other code than is here now ({', '.join(changed[:3])}"
                          f"{' ...' if len(changed) > 3 else ''}); --force rebuilds it")


def _stopped(job: Job, done_before: bool) -> int:
    where = "before" if done_before else "in"
    _tell(sys.stderr, f"\nstopped {where} {job.stage}; {_same_command(job)}")
    return INTERRUPTED


def _same_command(job: Job) -> str:
    return "the same command without --force continues" if job.forced else "the same command continues"


def _status_text(status: int) -> str:
    if status == 128 + signal.SIGKILL:
        return ("killed by signal 9, as the kernel does when memory runs out: see dmesg; a smaller train.micro_batch "
                "or launch.processes needs less")
    return f"killed by signal {status - 128}" if status > 128 else f"exit status {status}"


def _tell(stream: TextIO, text: str) -> None:
    """Print while there is somebody to read: a closed terminal or pipe ends no run, and the logs have the story."""
    with suppress(OSError):
        print(text, file=stream, flush=True)


def _gpus() -> int:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    try:
        listing = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=20, check=True).stdout
        present = sum(line.startswith("GPU ") for line in listing.splitlines())
    except (OSError, subprocess.SubprocessError):
        present = sum(path.name[6:].isdigit() for path in Path("/dev").glob("nvidia*"))
    if visible is None:
        return present
    return min(present, len([name for name in visible.split(",") if name.strip() not in ("", "-1")]))
