"""Runs the planned stages on this machine, one after the other. A stage is done if its manifest says so."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

from drover.launch.checks import refuse_changed
from drover.launch.devices import MASKS, smi, visible_gpus
from drover.launch.job.host import Host, JobSpec, StepEnd, process_end
from drover.launch.job.runner import Runner
from drover.launch.plan import Job, Machine, Options, process_environment
from drover.launch.processes import Each, Environment, run_local, show, stop_requests
from drover.launch.slurm.scheduler import NoScheduler
from drover.launch.slurm.start_logs import ONE_PROCESS
from drover.pipeline.config.tree import Config
from drover.pipeline.contract.entry import INTERRUPTED, report_done
from drover.pipeline.contract.run import Run
from drover.pipeline.contract.stages import STAGES
from drover.pipeline.contract.state import this_start
from drover.pipeline.core.background import usable_cores
from drover.pipeline.core.console import duration

WORDS = Path("logs") / "local.log"
"""The launcher's log of all stages and starts on this machine, in the run folder."""
MEMORY = (", as the kernel does when memory runs out (see dmesg); a smaller train.micro_batch or launch.processes "
          "needs less")


@dataclass
class LocalHost(Host):
    """This machine, for one stage."""

    log: Path = WORDS
    tells_refusals = False  # the stage may be running in another process

    def start(self, spec: JobSpec, command: Sequence[str], environment: Environment, folder: Path,
              each: Each) -> StepEnd:
        """The output goes to the terminal too."""
        group = run_local(command, environment, each, spec.stage, self.requests, spec.ranks, folder / ONE_PROCESS)
        end = process_end(group.status)
        if spec.ranks and group.failed:
            rank = group.failed[0][0]
            how = end.cause or f"exited with exit code {end.status}"
            end = replace(end, rank=rank, cause=f"rank {rank} on {self.nodes[0]}: {how}")
        return end

    def say(self, text: str, *, quiet: bool = False) -> None:
        """Write to the log and to the terminal."""
        with suppress(OSError), open(self.log, "a") as log:
            print(f"{datetime.now():%Y-%m-%d %H:%M:%S} {text}", file=log)
        if not quiet:
            show(sys.stderr, text)


def find_machine(device: str = "auto") -> Machine:
    """Cores that this process may use, and visible GPUs, without importing torch.

    device: launch.device. GPUs count only for `auto` and `cuda`.
    """
    if device not in ("auto", "cuda"):
        return Machine(usable_cores())
    rows = smi("--query-gpu=index")
    gpus = visible_gpus({}) if rows is None else len(rows)
    return Machine(usable_cores(), gpus if MASKS.isdisjoint(os.environ) else min(gpus, visible_gpus(os.environ)))


def run_jobs(config: Config, jobs: list[Job], options: Options) -> int:
    """Run the jobs; 0 if all are done, else the status of the one that failed."""
    began, run = time.monotonic(), Run(config)
    with stop_requests() as requests:
        for job in jobs:
            if status := _run_job(run, job, options, requests):
                return status
    report = run.folder / "report.html"
    what = f"report: {report}" if jobs[-1].stage == "report" and report.is_file() else f"run folder: {run.folder}"
    show(sys.stdout, f"\nall done in {duration(time.monotonic() - began)}; {what}")
    return 0


def _run_job(run: Run, job: Job, options: Options, requests: list[int]) -> int:
    again = f"the same command{' without --force' if job.forced else ''} continues"
    if requests:
        show(sys.stderr, f"\nstopped before {job.stage}; {again}")
        return INTERRUPTED
    job = replace(job, state=run.state(job.stage))
    if not job.to_run:
        with suppress(OSError):  # a closed terminal or pipe
            report_done(run, job.stage)
        return 0
    refuse_changed(run, job, options)
    log = run.folder / WORDS
    log.parent.mkdir(parents=True, exist_ok=True)
    start = this_start()
    host = LocalHost(start["job"], "local", start["restart"], (start["host"],), None, NoScheduler(), requests, log=log)
    # The user is watching: without checkpoints, let them decide whether to start the stage again.
    restarts = run.config.launch.max_restarts if STAGES[job.stage].checkpoints else 0
    environment = {**job.environment, **process_environment()}  # the user's overrides the planned one
    runner = Runner(replace(job, run=str(run.folder), environment=environment, requeue=False, max_restarts=restarts),
                    host)
    decision = runner.run()
    if decision.status == "done":
        return 0
    if requests or decision.status == "preempted":
        show(sys.stderr, f"\nstopped in {job.stage}; {again}")
        return INTERRUPTED
    if runner.last is None:  # nothing was started
        return 1
    folder, end = runner.last
    what = f" (exit status {end.status})" if decision.status == "failed" else f": {decision.reason}"
    hint = MEMORY if end.status == 128 + signal.SIGKILL else ""
    show(sys.stderr, f"\n{job.stage} failed{what}{hint}. Nothing after it was started. Its output is in "
                     f"{folder / ONE_PROCESS}. Once the cause is fixed, {again}.")
    return end.status or 1
