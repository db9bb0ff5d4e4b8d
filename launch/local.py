"""The planned stages on this box, one after the other; a stage counts as done when its manifest says so."""

from __future__ import annotations

import os
import platform
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import datetime
from pathlib import Path

from launch import host
from launch.box import Processes, rendezvous, tell
from launch.checks import refuse_stale
from launch.host import Allocation, Host
from launch.plan import Job, Options
from launch.processes import Interruptions
from launch.slurm.job.runner import Runner
from launch.slurm.job.srun import StepEnd, last_lines
from launch.slurm.jobspec import JobSpec
from pipeline.config.tree import Config
from pipeline.console import duration
from pipeline.contract.entry import INTERRUPTED
from pipeline.contract.run import Run
from pipeline.contract.stages import REPOSITORY, STAGES
from pipeline.contract.state import now

WORDS = Path("logs") / "local.log"
"""In a run folder: what the launcher said of all stages and starts on this box."""
MEMORY = (", as the kernel does when memory runs out: see dmesg; a smaller train.micro_batch or launch.processes needs "
          "less")
OUTPUT = "rank0.out"
"""In the folder of a start: the output of all its processes."""


class LocalHost(Host):
    """This box, for one stage."""

    def __init__(self, run_folder: Path, interruptions: Interruptions) -> None:
        self.log, self.interruptions = run_folder / WORDS, interruptions
        self.here = Allocation(os.environ.get("SLURM_JOB_ID", ""), "local",
                               int(os.environ.get("SLURM_RESTART_COUNT") or 0), (platform.node(),))

    def start(self, spec: JobSpec, command: Sequence[str], environment: Mapping[str, str], folder: Path,
              job: host.Job) -> StepEnd:
        """On the terminal as well."""
        return Processes(command, environment, spec.ranks, folder / OUTPUT, spec.stage, self.interruptions,
                         job.tick).run()

    def say(self, text: str, *, quiet: bool = False) -> None:
        """To the log, and to the terminal."""
        with suppress(OSError), open(self.log, "a") as log:
            print(f"{datetime.now():%Y-%m-%d %H:%M:%S} {text}", file=log)
        if not quiet:
            tell(sys.stderr, text)

    def rendezvous(self, spec: JobSpec, number: int) -> dict[str, str]:
        """On the loopback interface."""
        return rendezvous(spec.ranks, number)

    def last_words(self, folder: Path, end: StepEnd, count: int) -> list[str]:
        """Of all processes: they share a log."""
        return last_lines(folder / OUTPUT, count)


def run_jobs(config: Config, jobs: list[Job], options: Options) -> int:
    """Do the jobs; 0 if at the end all of them are done, else the status of the one that is not."""
    began = time.monotonic()
    chain = f"local-{now()}"
    with Interruptions() as interruptions:
        for job in jobs:
            status = _run_job(config, job, options, chain, interruptions)
            if status:
                return status
    report = config.folder / "report.html"
    what = f"report: {report}" if jobs[-1].stage == "report" and report.is_file() else f"run folder: {config.folder}"
    tell(sys.stdout, f"\nall done in {duration(time.monotonic() - began)}; {what}")
    return 0


def _run_job(config: Config, job: Job, options: Options, chain: str, interruptions: Interruptions) -> int:
    run = Run(config)
    if interruptions.count:
        return _stopped(job, done_before=True)
    state = run.state(job.stage)
    if state.kind == "done" and not job.forced:
        _say_done(run, job.stage)
        return 0
    refuse_stale(run, replace(job, state=state), options)
    runner = Runner(_spec(config, job, options, chain), LocalHost(run.folder, interruptions), interruptions)
    runner.run()
    decision = runner.decision
    if decision and decision.status == "done":
        return 0
    if decision is None or runner.stopping or decision.status == "preempted":
        return _stopped(job, done_before=False)
    folder, end = runner.starts.last or (run.folder, StepEnd(1))
    what = f" ({_status_text(end.status)})" if decision.status == "failed" else f": {decision.reason}"
    hint = MEMORY if end.status == 128 + signal.SIGKILL else ""
    tell(sys.stderr, f"\n{job.stage} failed{what}{hint}. Nothing after it was started. Its output is in "
                     f"{folder / OUTPUT}. Once the cause is mended, {_same_command(job)}.")
    return end.status or 1


def _spec(config: Config, job: Job, options: Options, chain: str) -> JobSpec:
    """What the user's environment says goes before what was planned. A stage that is forced begins afresh once: what is
    started again after a crash goes on."""
    arguments = [f"--force-id={chain}" if word == "--force" else word for word in job.arguments]
    environment = {**job.environment, **os.environ, **_python_environment(), "DROVER_LAUNCHED": "1"}
    return JobSpec(run=str(config.folder), name=job.name, stage=job.stage, chain=chain, ranks=job.ranks,
                   command=(options.python, "-m", STAGES[job.stage].module, *arguments), environment=environment,
                   tasks_per_node=job.tasks_per_node, requeue=False, max_restarts=config.launch.max_restarts)


def _python_environment() -> dict[str, str]:
    """Children import this checkout and nothing from the folder they run in, and hide no output."""
    inherited = os.environ.get("PYTHONPATH")
    return {"PYTHONPATH": os.pathsep.join([str(REPOSITORY), *([inherited] if inherited else [])]),
            "PYTHONSAFEPATH": "1", "PYTHONUNBUFFERED": "1"}


def _say_done(run: Run, stage: str) -> None:
    origin = f", reused from {run.stage_folder(stage)}" if run.is_reused(stage) else ""
    tell(sys.stdout, f"{stage:<9} up to date{origin}")
    if changed := run.changed_code(stage):
        tell(sys.stdout, f"{stage:<9} warning: made by other code than is here now ({', '.join(changed[:3])}"
                          f"{' ...' if len(changed) > 3 else ''}); --force rebuilds it")


def _stopped(job: Job, done_before: bool) -> int:
    where = "before" if done_before else "in"
    tell(sys.stderr, f"\nstopped {where} {job.stage}; {_same_command(job)}")
    return INTERRUPTED


def _same_command(job: Job) -> str:
    return "the same command without --force continues" if job.forced else "the same command continues"


def _status_text(status: int) -> str:
    return f"killed by signal {status - 128}" if status > 128 else f"exit status {status}"
