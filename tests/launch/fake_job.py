"""A running job for a machine without Slurm: its runner in this process, with starts that a test plays."""

from __future__ import annotations

import io
import math
from collections.abc import Iterable
from contextlib import redirect_stdout
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from drover.launch.job import runner, srun
from drover.launch.job.host import JobSpec, StepEnd
from drover.launch.job.preflight import PreflightResult
from drover.launch.job.srun import SlurmHost, read_end
from drover.launch.processes import stop_requests
from drover.launch.slurm.scheduler import JobInfo
from drover.pipeline.contract.manifest import Manifest
from drover.pipeline.contract.state import (
    STATE,
    StageJob,
    StageState,
    log_attempt,
    read_attempts,
    read_state,
    write_state,
)
from drover.pipeline.contract.workers import CLAIMS
from drover.pipeline.core.files import write_json, write_text

KILLED = "srun: error: n2: task 1: Killed\n"
NO_STEP = "srun: error: Unable to create step for job 12: Requested nodes are busy\n"


@dataclass
class Slurm:
    """What Slurm answers to a runner in this process, and what it was asked to do.

    states: of jobs; any other runs. silent: it does not say. down: nodes that failed. left_s: of the job's time.
    refusal: of a requeue. nodes: of the job.
    """

    states: dict[str, str] = field(default_factory=dict)
    silent: bool = False
    restarts: int = 0
    down: dict[str, str] = field(default_factory=dict)
    left_s: float = math.inf
    refusal: str | None = None
    nodes: tuple[str, ...] = ("n1", "n2")
    requeued: list[str] = field(default_factory=list)

    def jobs(self, ids: Iterable[str]) -> dict[str, JobInfo] | None:
        return None if self.silent else {
            id: JobInfo(id, self.states.get(id, "RUNNING"), restarts=self.restarts, left_s=self.left_s) for id in ids}

    def node_states(self, nodes: Iterable[str]) -> dict[str, str]:
        return {node: self.down.get(node, "idle") for node in nodes}

    def node_address(self, name: str) -> str:
        return "localhost"

    def requeue(self, id: str) -> str | None:
        self.requeued.append(id)
        return self.refusal


@dataclass
class Job:
    """A job in a folder of its own: its spec, and Slurm's answers.

    commands, environments: of its starts. start: what the stage of the last one was passed.
    """

    folder: Path
    spec: JobSpec
    slurm: Slurm = field(default_factory=Slurm)
    commands: list[str] = field(default_factory=list)
    environments: list[dict[str, str]] = field(default_factory=list)
    start: StageJob = field(default_factory=StageJob)

    @property
    def run(self) -> Path:
        return Path(self.spec.run)

    @property
    def stage(self) -> Path:
        return self.spec.folder

    def go(self, *plan: Any, job: str = "12", restart: int = 0,
           element: int | None = None, trial: Any = None, **changes: Any) -> tuple[str, str]:
        """Run the job to its end; the action that ended it, and its log. plan: what each start does (`play`).

        element: of array 20. trial: what preflight finds, or does. changes: of the spec.
        """
        self.spec, self.slurm.restarts, left = replace(self.spec, **changes), restart, iter(plan)

        def start(command, environment, folder, each, say):
            self.commands.append(" ".join(command))
            self.environments.append(environment)
            if "--job" in command:
                self.start = StageJob.parse(command[command.index("--job") + 1])
            what = next(left)
            return what(each) if callable(what) else self.play(what, folder, element)

        with redirect_stdout(io.StringIO()) as log, stop_requests() as requests, pytest.MonkeyPatch.context() as patch:
            patch.setenv("SLURM_JOB_ID", job)
            patch.setenv("SLURM_RESTART_COUNT", str(restart))
            patch.setattr(runner, "PAUSE_S", 0.0)
            patch.setattr(runner, "run_preflight", trial if callable(trial) else
                          lambda *_: trial or PreflightResult({}, ["all is well"]))
            patch.setattr(srun, "STEP_PAUSE_S", 0.0)
            patch.setattr(srun, "run_step", start)
            patch.setattr(SlurmHost, "requeue", lambda host: self.slurm.requeue(host.name))
            host = SlurmHost(job, job if element is None else f"20_{element}", restart, self.slurm.nodes,
                             element, self.slurm, requests)  # type: ignore[arg-type]
            return runner.Runner(self.spec, host).run().action, log.getvalue()

    def play(self, what: str, folder: Path, element: int | None) -> StepEnd:
        """What a start leaves, and how its processes end."""
        say = partial(write_state, self.stage, attempt=self.start.start,
                      file=STATE if element is None else f"{CLAIMS}/20_{element}.json")
        kind, _, which = what.partition(" ")
        if what == "no step":
            return read_end(1, NO_STEP)
        if what == "refuse":
            self.say(folder, 0, "there is nothing to train on")
            return read_end(143, "srun: error: n1: task 0: Exited with exit code 2\n")
        if kind == "no":  # srun could not start a task there, so there was no step
            return read_end(1, f"srun: error: Task launch for StepId=12.0 failed on node {which}: Communication "
                               f"connection failure\nsrun: error: Application launch failed: Communication\n")
        if kind == "lose":
            say("running")
            return read_end(1, "".join(f"srun: error: Node failure on {node}\n" for node in which.split(",")))
        if what == "work":
            Manifest(self.spec.stage, {}, [], {"steps": 1}, "").write(self.stage)
            if element is None:
                say("done")
            return StepEnd(0)
        if what == "asked":
            write_json(self.stage / "checkpoints/step-00000120/COMPLETE.json", {})
            say("preempted", step=120, reason="time limit", again=True)
            return StepEnd(0)
        if element is None:
            say("running")
        if kind == "save":
            write_json(self.stage / f"checkpoints/step-{which:0>8}/COMPLETE.json", {})
        self.say(folder, 1, "this rank says why")
        return read_end(143, KILLED)

    def say(self, folder: Path, rank: int, text: str) -> None:
        """What a rank writes, one on each node."""
        write_text(folder / f"node{rank}.log", f"{rank}: {text}\n")

    def events(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in read_attempts(self.run) if event["event"] == kind]

    def ends(self) -> list[str]:
        """Such as `crashed restart`: how each start ended, and what came next."""
        return ["{status} {next}".format(**event) for event in self.events("ended")]

    def state(self) -> StageState | None:
        return read_state(self.stage)

    def unseen(self, restart: int, name: str = "12") -> None:
        """Log a start whose end its runner has not told."""
        (self.run / "logs" / self.spec.stage / f"{name}.{restart}").mkdir(parents=True)
        self.log("attempt", restart, name, nodes=["n1", "n2"])

    def crashed(self, restart: int, name: str = "12") -> None:
        """Log a start that crashed and brought nothing."""
        self.unseen(restart, name)
        self.log("ended", restart, name, status="crashed", next="requeue")

    def log(self, event: str, restart: int, name: str, **details: Any) -> None:
        """Log an event of the first start of a restart of the job."""
        log_attempt(self.run, event, stage=self.spec.stage, job=name, restart=restart, start=restart, chain="c",
                    **details)


def make_job(folder: Path, stage: str = "train", **changes: Any) -> Job:
    """A job of two ranks on two nodes, the second job (12) of the chain `c`."""
    run = folder / "runs" / "trial"
    (run / "launch").mkdir(parents=True)
    spec = JobSpec(run=str(run), name=f"trial-{stage}", stage=stage, chain="c", ranks=2, nodes=2,
                   command=("python", "-m", f"drover.pipeline.{stage}"))
    return Job(folder, replace(spec, **changes))
