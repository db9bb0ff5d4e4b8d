"""Where a job of Slurm runs: its allocation, from Slurm's variables in the batch step, and srun."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from secrets import token_hex

from drover.launch.host import Host
from drover.launch.processes import free_port
from drover.launch.slurm.job.joblock import JobLock
from drover.launch.slurm.job.srun import StepEnd, run_step, srun_command
from drover.launch.slurm.jobspec import JobSpec
from drover.launch.slurm.nodes import address
from drover.launch.slurm.scheduler import Scheduler
from drover.pipeline.contract.signed import SECRET
from drover.pipeline.errors import UserError

STEP_TRIES = 4
"""Calls of srun until a step that cannot be made is given up."""
STEP_PAUSE_S = 5.0


class SlurmHost(Host):
    """A job's nodes."""

    @classmethod
    def from_environment(cls, environment: Mapping[str, str], scheduler: Scheduler, asked: list[int]) -> SlurmHost:
        """UserError outside of a job."""
        if "SLURM_JOB_ID" not in environment:
            raise UserError("drover.launch.slurm.job.runner is what a Slurm job runs; `python launch/submit.py` makes "
                            "jobs.")
        job, element = environment["SLURM_JOB_ID"], environment.get("SLURM_ARRAY_TASK_ID")
        name = job if element is None else f"{environment.get('SLURM_ARRAY_JOB_ID', job)}_{element}"
        return cls(job, name, int(environment.get("SLURM_RESTART_COUNT") or 0),
                   tuple(scheduler.hostnames(environment.get("SLURM_JOB_NODELIST", ""))),
                   None if element is None else int(element), scheduler, asked)

    def lock(self, spec: JobSpec) -> JobLock | None:
        """Elements of an array work on one stage together."""
        return JobLock(Path(spec.run), spec.stage, self.job, self.restart, self.scheduler, spec.chain) \
            if self.index is None else None

    def start(self, spec: JobSpec, command: Sequence[str], environment: Mapping[str, str], folder: Path,
              each: Callable[[], bool]) -> StepEnd:
        """As a step of srun: Slurm tells only steps that the time limit is near."""
        srun = srun_command(spec, folder, spec.stage, command)
        for number in range(1, STEP_TRIES + 1):
            end = run_step(srun, environment, folder, each, self.say)
            if end.started or end.abandoned or self.asked or number == STEP_TRIES or not self.is_current():
                break
            self.say(f"there is no step: {end.cause}; trying again ({number} of {STEP_TRIES - 1})")
            self.pause(STEP_PAUSE_S * number, each)
        return end

    def say(self, text: str, *, quiet: bool = False) -> None:
        """All goes to the job's log."""
        print(f"{datetime.now():%Y-%m-%d %H:%M:%S} {text}", flush=True)

    def rendezvous(self, spec: JobSpec) -> dict[str, str]:
        """On the first node. Ranks sign what they leave in their store with the secret."""
        return {"MASTER_ADDR": address(self.nodes[0], self.scheduler), "MASTER_PORT": str(free_port()),
                "DROVER_RANKS": str(spec.ranks), "DROVER_GPUS": str(spec.gpus_per_node), SECRET: token_hex(32)}
