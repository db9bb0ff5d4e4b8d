"""A running job for a machine without Slurm: its runner in this process with starts that a test plays, or as a process
with real ranks under a stand-in for srun."""

from __future__ import annotations

import io
import math
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import redirect_stdout
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from launch.slurm.chain import Chain, ChainJob
from launch.slurm.job import runner, starts
from launch.slurm.job.allocation import Allocation
from launch.slurm.job.preflight import Found
from launch.slurm.job.srun import StepEnd
from launch.slurm.jobspec import JobSpec
from launch.slurm.scheduler import JobInfo
from pipeline.contract.manifest import Manifest
from pipeline.contract.parts import PARTS, last_word_file
from pipeline.contract.state import StageState, log_attempt, read_attempts, read_state, write_state
from pipeline.files import write_json, write_text
from tests.launch.fake_house import runs
from tests.waiting import HANG_S

ROOT = Path(__file__).resolve().parents[2]

SRUN = f"""#!{sys.executable}
import os, signal, subprocess, sys, time
with open(os.path.join(os.path.dirname(sys.argv[0]), "srun.calls"), "a") as file:
    file.write(" ".join(sys.argv[1:]) + "\\n")
options = dict(word[2:].partition("=")[::2] for word in sys.argv[1:] if word.startswith("--"))
first = next(number for number, word in enumerate(sys.argv[1:], 1) if not word.startswith("--"))
tasks, per = int(options["ntasks"]), int(options["ntasks-per-node"])
running = {{}}
for task in range(tasks):
    environment = {{**os.environ, "SLURM_PROCID": str(task), "SLURM_NTASKS": str(tasks),
                   "SLURM_LOCALID": str(task % per), "SLURM_NODEID": str(task // per),
                   "SLURM_STEP_NUM_NODES": options["nodes"], "SLURMD_NODENAME": f"n{{1 + task // per}}"}}
    running[task] = subprocess.Popen(sys.argv[first:], env=environment,
                                     stdout=open(options["output"].replace("%t", str(task)), "wb"),
                                     stderr=open(options["error"].replace("%t", str(task)), "wb"))
def end(*_):
    for process in running.values():
        process.kill()
signal.signal(signal.SIGTERM, end)
worst = 0
while running:
    for task, process in list(running.items()):
        status = process.poll()
        if status is None:
            continue
        del running[task]
        if status:
            worst = worst or 143
            how = signal.strsignal(-status) if status < 0 else f"Exited with exit code {{status}}"
            print(f"srun: error: n{{1 + task // per}}: task {{task}}: {{how}}", file=sys.stderr, flush=True)
            end()
    time.sleep(0.02)
sys.exit(worst)
"""

STAGE = '''
"""A stage for tests: what each of its starts does stands in a file."""
import os, signal, sys, time
from pathlib import Path
from pipeline.contract.manifest import Manifest
from pipeline.contract.state import write_state
folder, plan = Path(sys.argv[1]), Path(sys.argv[2]).read_text().split()
rank, attempt = int(os.environ["RANK"]), int(os.environ["DROVER_ATTEMPT"])
what = plan[min(attempt, len(plan) - 1)]
pids = folder.parent / "pids"
pids.mkdir(parents=True, exist_ok=True)
print("rank", rank, "of", os.environ["WORLD_SIZE"], "at", os.environ["MASTER_PORT"], flush=True)
if rank == 0:
    write_state(folder, "running")
(pids / f"{attempt}-{rank}").write_text(str(os.getpid()))
if what == "crash" and rank == 1:
    print("this rank says why", file=sys.stderr, flush=True)
    while not (pids / f"{attempt}-0").exists():
        time.sleep(0.02)
    os.kill(os.getpid(), signal.SIGKILL)
if what != "work":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(3600)
if rank == 0:
    Manifest(folder.name, {}, [], {"steps": 1}, "").write(folder)
    write_state(folder, "done")
'''
KILLED = "srun: error: n2: task 1: Killed\n"
NO_STEP = "srun: error: Unable to create step for job 12: Requested nodes are busy\n"


@dataclass
class Slurm:
    """What Slurm answers to a runner in this process, and what it was asked to do.

    states: of jobs; any other runs. silent: it does not say. down: nodes that failed. left_s: of the job's time.
    refusal: of a requeue.
    """

    states: dict[str, str] = field(default_factory=dict)
    silent: bool = False
    restarts: int = 0
    down: dict[str, str] = field(default_factory=dict)
    left_s: float = math.inf
    refusal: str | None = None
    address: str = "localhost"
    requeued: list[str] = field(default_factory=list)
    left_out: dict[str, list[str]] = field(default_factory=dict)

    def jobs(self, ids: Iterable[str]) -> dict[str, JobInfo] | None:
        found = {id: JobInfo(id, self.states.get(id, "RUNNING"), restarts=self.restarts) for id in ids}
        return None if self.silent else found

    def node_states(self, nodes: Iterable[str]) -> dict[str, str]:
        return {node: self.down.get(node, "idle") for node in nodes}

    def node_address(self, name: str) -> str:
        return self.address

    def seconds_left(self, id: str) -> float:
        return self.left_s

    def requeue(self, id: str, patience_s: float) -> str | None:
        self.requeued.append(id)
        return self.refusal

    def leave_out(self, id: str, nodes: Iterable[str]) -> None:
        self.left_out[id] = list(nodes)


@dataclass
class Job:
    """A job in a folder of its own: its spec, and Slurm's answers."""

    folder: Path
    spec: JobSpec
    slurm: Slurm = field(default_factory=Slurm)
    commands: list[str] = field(default_factory=list)

    @property
    def run(self) -> Path:
        return Path(self.spec.run)

    @property
    def stage(self) -> Path:
        return self.spec.folder

    # ---- in this process

    def go(self, *plan: str | Callable[[Callable[[], bool]], StepEnd], job: str = "12", restart: int = 0,
           element: int | None = None, trial: Found | None = None, **changes: Any) -> tuple[int, str]:
        """Run the job to its end; its exit status and log. plan: what each start does (`play`).

        element: of array 20. trial: what preflight finds. changes: of the spec.
        """
        self.spec, self.slurm.restarts = replace(self.spec, **changes), restart
        with redirect_stdout(io.StringIO()) as said, pytest.MonkeyPatch.context() as patch:
            made = self.runner(patch, iter(plan), job, restart, element)
            patch.setattr(runner, "run_preflight", lambda *_: trial or Found({}, ["all is well"]))
            patch.setattr(signal, "signal", lambda *_: None)
            return made.run(), said.getvalue()

    def runner(self, patch: pytest.MonkeyPatch, plan: Iterator[Any], job: str = "12", restart: int = 0,
               element: int | None = None) -> runner.Runner:
        """The job's runner."""
        for name, value in {"SLURM_JOB_ID": job, "SLURM_RESTART_COUNT": str(restart), "DROVER_ATTEMPT": "0"}.items():
            patch.setenv(name, value)
        patch.setattr(runner, "PAUSE_S", 0.0)
        patch.setattr(starts, "STEP_PAUSE_S", 0.0)

        def start(command, environment, folder, each, *more):
            self.commands.append(" ".join(command))
            what = next(plan)
            return what(each) if callable(what) else self.play(what, folder, element, more)

        patch.setattr(starts, "run_step", start)
        patch.setattr(starts, "run_child", start)
        here = Allocation(job, job if element is None else f"20_{element}", restart, ("n1", "n2")[:self.spec.nodes],
                          element)
        return runner.Runner(self.spec, here, self.slurm)  # type: ignore[arg-type]

    def play(self, what: str, folder: Path, element: int | None, more: tuple[Any, ...]) -> StepEnd:
        """What a start leaves, and how its processes end."""
        say = partial(write_state, self.stage) if element is None else partial(
            write_state, self.stage / PARTS, file=last_word_file(self.spec.phase, element, self.spec.parts))
        if what == "no step":
            return StepEnd(1, NO_STEP)
        if what == "abandoned":
            return StepEnd(137, abandoned=True)
        if what == "refuse":
            (folder / "rank0.err").write_text("there is nothing to train on\n")
            return StepEnd(143, "srun: error: n1: task 0: Exited with exit code 2\n") if self.spec.ranks else StepEnd(2)
        if what == "work":
            if element is None:
                Manifest(self.spec.stage, {}, [], {"steps": 1}, "").write(self.stage)
                say("done")
            else:
                write_json(self.stage / PARTS / f"{self.spec.phase}.{element}-of-{self.spec.parts}.json", {})
            return StepEnd(0)
        if what == "asked":
            write_json(self.stage / "checkpoints/step-00000120/COMPLETE.json", {})
            say("preempted", step=120, reason="time limit", again=True)
            return StepEnd(0)
        if what == "units":  # a stage without ranks: ended, or warned of the time limit
            ends, warns = more
            say("preempted", reason=f"{'SIGTERM' if ends() else 'SIGUSR2' if warns() else '?'}: 3 of 4 units",
                again=not ends())
            return StepEnd(130)
        if what == "failed":
            say("failed", reason="the third record is broken")
            return StepEnd(143)
        if element is None:
            say("running")
        if what.startswith("save"):
            write_json(self.stage / f"checkpoints/step-{what[4:]:0>8}/COMPLETE.json", {})
        write_text(folder / ("rank1.err" if self.spec.ranks else "rank0.err"), "this rank says why\n")
        return StepEnd(143, KILLED) if self.spec.ranks else StepEnd(137)

    # ---- as processes

    def start(self, *plan: str) -> subprocess.Popen[str]:
        """The runner as a process, with real ranks."""
        (self.folder / "plan").write_text(" ".join(plan))
        self.spec.save(self.folder / "spec.json")
        return subprocess.Popen([sys.executable, "-m", "launch.slurm.job.runner", str(self.folder / "spec.json")],
                                env=self.environ(), cwd=self.folder, text=True, stdout=subprocess.PIPE,
                                stderr=subprocess.STDOUT)

    def run_it(self, *plan: str) -> tuple[int, str]:
        """Run it to its end; its exit status and log."""
        process = self.start(*plan)
        try:
            out, _ = process.communicate(timeout=HANG_S)
        finally:
            process.kill()
        return process.returncode, out

    def environ(self, **more: str) -> dict[str, str]:
        """The environment of a job, with the stand-in for srun on PATH."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "DROVER", "RANK"))}
        return {**kept, "PATH": f"{self.folder / 'bin'}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT),
                "SLURM_JOB_ID": "12", "SLURM_JOB_NODELIST": "n[1-2]", **more}

    def notes(self) -> list[Path]:
        """Files with the process ids of the ranks that were started."""
        return [path for path in sorted((self.run / "pids").glob("*")) if path.read_text()]

    def alive(self) -> list[Path]:
        """Those of ranks that still run."""
        return list(filter(runs, self.notes()))

    def kill_all(self) -> None:
        for note in self.alive():
            os.kill(int(note.read_text()), signal.SIGKILL)

    # ---- what is left

    def calls(self) -> list[str]:
        """What srun was called with."""
        return (self.folder / "bin/srun.calls").read_text().splitlines()

    def events(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in read_attempts(self.run) if event["event"] == kind]

    def ends(self) -> list[tuple[str, str]]:
        return [(event["status"], event["next"]) for event in self.events("ended")]

    def state(self) -> StageState:
        state = read_state(self.stage)
        assert state is not None
        return state

    def unseen(self, restart: int, name: str = "12") -> None:
        """Log a start whose end its runner has not told."""
        log_attempt(self.run, "attempt", stage=self.spec.stage, job=name, restart=restart, start=restart, chain="c",
                    ranks=2, nodes=["n1", "n2"], **{"from": None})

    def crashed(self, restart: int, name: str = "12") -> None:
        """Log a start that crashed and brought nothing."""
        self.unseen(restart, name)
        log_attempt(self.run, "ended", stage=self.spec.stage, job=name, restart=restart, start=restart, chain="c",
                    status="crashed", reason="", step=None, next="requeue")


def make_job(folder: Path, stage: str = "train", **changes: Any) -> Job:
    """A job of two ranks on two nodes, the second job (12) of the chain `c`."""
    (folder / "bin").mkdir(parents=True)
    (folder / "bin/srun").write_text(SRUN)
    for name in ("scontrol", "squeue", "sinfo", "sacct"):  # Slurm does not answer, whatever this machine has
        (folder / "bin" / name).write_text("#!/bin/sh\nexit 1\n")
    for path in (folder / "bin").iterdir():
        path.chmod(0o755)
    (folder / "stage.py").write_text(STAGE)
    run = folder / "runs" / "trial"
    (run / "launch").mkdir(parents=True)
    spec = JobSpec(run=str(run), name=f"trial-{stage}", stage=stage, chain="c", ranks=2, nodes=2, command=(
        sys.executable, str(folder / "stage.py"), str(run / stage), str(folder / "plan")))
    return Job(folder, replace(spec, **changes))


def chain_of(job: Job, *ids: str) -> None:
    """Record a chain of links for the job's stage."""
    Chain("c", "", (), {}, "", "", "", jobs=tuple(ChainJob(job.spec.name, job.spec.stage, "link", id) for id in ids)
          ).write(job.run)
