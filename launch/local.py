"""The planned stages on this box, one after the other; a stage counts as done when its manifest says so."""

from __future__ import annotations

import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

from drover.launch.checks import refuse_stale
from drover.launch.host import Host, StepEnd, process_end
from drover.launch.plan import Job, Machine, Options
from drover.launch.processes import Processes, stop_requests, tell
from drover.launch.slurm.job.rank import visible_gpus
from drover.launch.slurm.job.runner import Runner
from drover.launch.slurm.jobspec import JobSpec
from drover.launch.slurm.scheduler import NoScheduler
from drover.launch.slurm.start_logs import ONE_PROCESS
from drover.pipeline.config.tree import Config
from drover.pipeline.contract.entry import INTERRUPTED
from drover.pipeline.contract.preparation import report_done
from drover.pipeline.contract.run import Run
from drover.pipeline.contract.stages import IMPORTED_FROM, STAGES
from drover.pipeline.contract.state import now
from drover.pipeline.contract.threads import usable_cores
from drover.pipeline.core.console import duration
from drover.pipeline.parallel.free_memory import free_on_host

WORDS = Path("logs") / "local.log"
"""In a run folder: what the launcher said of all stages and starts on this box."""
MEMORY = (", as the kernel does when memory runs out: see dmesg; a smaller train.micro_batch or launch.processes needs "
          "less")


@dataclass
class LocalHost(Host):
    """This box, for one stage."""

    log: Path = WORDS

    def start(self, spec: JobSpec, command: Sequence[str], environment: Mapping[str, str], folder: Path,
              each: Callable[[], bool]) -> StepEnd:
        """On the terminal as well."""
        processes = Processes(command, environment, spec.stage, self.asked, spec.ranks, folder / ONE_PROCESS,
                              shown=True)
        end = process_end(processes.run(each))
        if not spec.ranks or not processes.failed:
            return end
        rank, cause = processes.failed[0][0], end.cause or f"exited with exit code {end.status}"
        return replace(end, rank=rank, cause=f"rank {rank} on {self.nodes[0]}: {cause}")

    def say(self, text: str, *, quiet: bool = False) -> None:
        """To the log, and to the terminal."""
        with suppress(OSError), open(self.log, "a") as log:
            print(f"{datetime.now():%Y-%m-%d %H:%M:%S} {text}", file=log)
        if not quiet:
            tell(sys.stderr, text)


def find_machine(device: str = "auto") -> Machine:
    """Cores that this process may use, GPUs that it can see, and memory, without importing torch.

    device: launch.device; without CUDA no GPU counts.
    """
    if device not in ("auto", "cuda"):
        return Machine(usable_cores(), 0, free_on_host())
    query = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        listing = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout.splitlines()
        gpus, chosen = len(listing), os.environ.get("CUDA_VISIBLE_DEVICES")
        sizes = [int(mib) << 20 if mib.strip().isdigit() else 0 for mib in listing]
        if chosen is not None:  # by their numbers; of those chosen otherwise the memory is not known
            sizes = [sizes[int(one)] if one.isdecimal() and int(one) < gpus else 0 for one in chosen.split(",")]
        memory = min(sizes, default=0)
    except (OSError, subprocess.SubprocessError):
        gpus, memory = visible_gpus({}), 0
    if "CUDA_VISIBLE_DEVICES" in os.environ:
        gpus = min(gpus, visible_gpus(os.environ))
    return Machine(usable_cores(), gpus, memory if gpus else free_on_host())


def run_jobs(config: Config, jobs: list[Job], options: Options) -> int:
    """Do the jobs; 0 if at the end all of them are done, else the status of the one that is not."""
    began = time.monotonic()
    chain = f"local-{now()}"
    with stop_requests() as asked:
        for job in jobs:
            if status := _run_job(config, job, options, chain, asked):
                return status
    report = config.folder / "report.html"
    what = f"report: {report}" if jobs[-1].stage == "report" and report.is_file() else f"run folder: {config.folder}"
    tell(sys.stdout, f"\nall done in {duration(time.monotonic() - began)}; {what}")
    return 0


def _run_job(config: Config, job: Job, options: Options, chain: str, asked: list[int]) -> int:
    run = Run(config)
    again = f"the same command{' without --force' if job.forced else ''} continues"
    if asked:
        tell(sys.stderr, f"\nstopped before {job.stage}; {again}")
        return INTERRUPTED
    state = run.state(job.stage)
    if state.kind == "done" and not job.forced:
        with suppress(OSError):  # a closed terminal or pipe
            report_done(run, job.stage)
        return 0
    refuse_stale(run, replace(job, state=state), options)
    (run.folder / WORDS).parent.mkdir(parents=True, exist_ok=True)
    here = LocalHost(os.environ.get("SLURM_JOB_ID", ""), "local", int(os.environ.get("SLURM_RESTART_COUNT") or 0),
                     (platform.node(),), None, NoScheduler(), asked, run.folder / WORDS)
    runner = Runner(_spec(config, job, options, chain), here)
    status, decision = runner.run(), runner.decision
    if decision and decision.status == "done":
        return 0
    if asked or (decision and decision.status == "preempted"):
        tell(sys.stderr, f"\nstopped in {job.stage}; {again}")
        return INTERRUPTED
    if decision is None:  # an earlier start of the Slurm job that this runs in has done the stage, or given it up
        return status
    folder, end = runner.last or (run.folder, StepEnd(1))
    what = f" (exit status {end.status})" if decision.status == "failed" else f": {decision.reason}"
    hint = MEMORY if end.status == 128 + signal.SIGKILL else ""
    tell(sys.stderr, f"\n{job.stage} failed{what}{hint}. Nothing after it was started. Its output is in "
                     f"{folder / ONE_PROCESS}. Once the cause is mended, {again}.")
    return end.status or 1


def _spec(config: Config, job: Job, options: Options, chain: str) -> JobSpec:
    """What the user's environment says goes before what was planned. A stage that is forced begins afresh once: what is
    started again after a crash goes on."""
    command = job.command
    if options.force:
        command = tuple(f"--force-id={chain}" if word == "--force" else word for word in command)
    path = os.pathsep.join(filter(None, [str(IMPORTED_FROM), os.environ.get("PYTHONPATH")]))
    # Children import this checkout and nothing from the folder they run in, and hide no output.
    environment = {**job.environment, **os.environ, "PYTHONPATH": path, "PYTHONSAFEPATH": "1", "PYTHONUNBUFFERED": "1",
                   "DROVER_LAUNCHED": "1"}
    # Somebody watches: a stage that can lose nothing is for him to start again.
    restarts = config.launch.max_restarts if STAGES[job.stage].checkpoints else 0
    return replace(job, run=str(config.folder), chain=chain, command=command, environment=environment, requeue=False,
                   max_restarts=restarts)
