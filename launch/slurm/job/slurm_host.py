"""Where a job of Slurm runs: its allocation, from Slurm's variables in the batch step, and srun."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path

from launch.host import Allocation, Host, Job, free_port
from launch.slurm.job.joblock import JobLock
from launch.slurm.job.srun import StepEnd, last_words, run_child, run_step, srun_command
from launch.slurm.job.time_limit import TimeLimit
from launch.slurm.jobspec import JobSpec
from launch.slurm.nodes import address, lost
from launch.slurm.scheduler import UNKNOWN, Scheduler
from pipeline.errors import UserError

CONTROLLER_S = 120.0
"""For Slurm's controller to come back, before a requeue is given up."""
STEP_TRIES = 4
"""Calls of srun until a step that cannot be made is given up."""
STEP_PAUSE_S = 5.0
RUNNING = ("RUNNING", "SUSPENDED", "STOPPED", "SIGNALING", "RESIZING", "CONFIGURING")
"""States of a job that has its nodes and is to keep them."""


class SlurmHost(Host):
    """A job's nodes."""

    def __init__(self, here: Allocation, scheduler: Scheduler) -> None:
        self.here, self.scheduler = here, scheduler

    @classmethod
    def from_environment(cls, environment: Mapping[str, str], scheduler: Scheduler) -> SlurmHost:
        """UserError outside of a job."""
        if "SLURM_JOB_ID" not in environment:
            raise UserError("launch.slurm.job.runner is what a Slurm job runs; `python launch/submit.py` makes jobs.")
        job, element = environment["SLURM_JOB_ID"], environment.get("SLURM_ARRAY_TASK_ID")
        name = job if element is None else f"{environment.get('SLURM_ARRAY_JOB_ID', job)}_{element}"
        return cls(Allocation(job, name, int(environment.get("SLURM_RESTART_COUNT") or 0),
                              tuple(scheduler.hostnames(environment.get("SLURM_JOB_NODELIST", ""))),
                              None if element is None else int(element)), scheduler)

    def lock(self, spec: JobSpec) -> JobLock:
        """What keeps other jobs from the stage."""
        here = self.here
        return JobLock(Path(spec.run), spec.stage, here.job, here.restart, self._state_of, spec.chain)

    def start(self, spec: JobSpec, command: Sequence[str], environment: Mapping[str, str], folder: Path,
              job: Job) -> StepEnd:
        """Ranks as a step of srun, a stage without ranks as a child of this process."""
        if not spec.ranks:
            limit = TimeLimit(self.scheduler, self.here.name, spec.signal_s)
            return run_child(command, environment, folder, job.tick, lambda: job.stopping,
                             lambda: spec.warned and limit.is_near())
        srun = srun_command(spec, folder, command, stage=spec.stage)
        for number in range(1, STEP_TRIES + 1):
            end = run_step(srun, environment, folder, job.tick, job.say)
            if end.started or end.abandoned or job.stopping or number == STEP_TRIES or not self.is_current():
                break
            job.say(f"there is no step: {end.cause}; trying again ({number} of {STEP_TRIES - 1})")
            job.pause(STEP_PAUSE_S * number)
        return end

    def say(self, text: str, *, quiet: bool = False) -> None:
        """All goes to the job's log."""
        print(f"{datetime.now():%Y-%m-%d %H:%M:%S} {text}", flush=True)

    def rendezvous(self, spec: JobSpec, number: int) -> dict[str, str]:
        """On the first node."""
        return {"MASTER_ADDR": address(self.here.nodes[0], self.scheduler),
                "MASTER_PORT": str(free_port(int(self.here.job), number)),
                "DROVER_RANKS": str(spec.ranks), "DROVER_GPUS": str(spec.gpus_per_node)}

    def last_words(self, folder: Path, end: StepEnd, count: int) -> list[str]:
        """Of the first failing rank's errors."""
        return last_words(folder, end, count)

    def is_current(self) -> bool:
        """Whether Slurm still holds this start of the job for one that runs; so it is where Slurm does not answer.

        A node that Slurm gave up may run what it was given for long. A step that it asks for under the job's id would
        get the nodes of the job's next start.
        """
        found = self.scheduler.jobs([self.here.name])
        if found is None or (job := found[self.here.name]).state == UNKNOWN:
            return True
        return job.state in RUNNING and job.restarts == self.here.restart

    def seconds_left(self) -> float:
        """As Slurm says."""
        return self.scheduler.seconds_left(self.here.job)

    def requeue(self) -> str | None:
        """Tried again while the controller is away."""
        return self.scheduler.requeue(self.here.name, patience_s=CONTROLLER_S)

    def failed_nodes(self, nodes: Iterable[str]) -> dict[str, str]:
        """As Slurm says."""
        return lost(list(nodes), self.scheduler)

    def leave_out(self, job: str, nodes: Iterable[str]) -> str | None:
        """Besides those that it leaves out already."""
        return self.scheduler.leave_out(job, nodes)

    def _state_of(self, job: str) -> str | None:
        found = self.scheduler.jobs([job])
        return None if found is None else found[job].state
