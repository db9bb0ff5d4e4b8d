"""A real Slurm on this machine, and a small training as a job of it: submitted as users do, disturbed at a known step,
and proven afterwards.

Rank 0 is made to wait before some of its steps (`DROVER_FAULTS`), until a test lets it go on or has it asked to end:
what a test does then lands there on any machine, however fast or busy.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import psutil
import pytest

from drover.launch.slurm.nodes import is_lost
from drover.pipeline.contract.manifest import read_manifest
from drover.pipeline.contract.state import StageState, read_attempts, read_state
from drover.pipeline.core.files import read_json
from drover.pipeline.records.checkpoints import complete_checkpoints
from tests.conftest import REPOSITORY, environment, merged, run_stage
from tests.faulty import GO, PLUGIN
from tests.slurm_lab import Lab, user_name
from tests.stages.training import curve, difference, lines, proven, reusing
from tests.waiting import HANG_S, process_words, wait_for

T = TypeVar("T")
STEPS, EVERY = 72, 4
"""Steps of the training, and between two checkpoints."""
WAITS = range(EVERY + 2, STEPS, EVERY)
"""Steps before which rank 0 waits: each after another checkpoint."""
SETTINGS = {
    "train": {"steps": STEPS, "precision": "fp64", "micro_batch": 4, "validation_every": 24, "sample_every": 100,
              "checkpoint": {"every_steps": EVERY}},
    "launch": {"processes": 1, "preflight": False, "time": 600}}


class Cluster(Lab):
    """A real Slurm on this machine. Its nodes are n1, n2 ... of four CPUs."""

    def run(self, *command: str | Path, check: bool = True, cwd: Path | None = None,
            variables: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        """Run a program against this cluster. A question that the controller is too busy to answer in time is asked
        again, where an answer is wanted (`check`)."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "SBATCH"))}
        for _ in range(6):
            result = subprocess.run([str(word) for word in command], cwd=cwd, text=True, capture_output=True,
                                    env={**kept, **self.environment(), **(variables or {})},
                                    stdin=subprocess.DEVNULL, timeout=HANG_S)
            if not (check and (command[0] == "squeue" or "show" in command) and "Socket timed out" in result.stderr):
                break
        assert not check or result.returncode == 0, f"{command}: {result.returncode}\n{result.stdout}{result.stderr}"
        return result

    def is_idle(self) -> bool:
        """Whether Slurm says that the queue is empty. It is asked twice a second at most: who waits leaves the
        processors to the jobs."""
        time.sleep(0.5)
        answer = self.run("squeue", "--noheader", check=False)
        return answer.returncode == 0 and not answer.stdout.strip()

    def cancel_all(self) -> None:
        """Cancel whatever is in the queue."""
        self.run("scancel", "--user", user_name())

    def state(self, job: str) -> str:
        """The state of a job, also after its end, with the reason where it waits: "PENDING Dependency"."""
        shown = dict(word.split("=", 1) for word in self.run("scontrol", "--oneliner", "show", "job", job
                                                             ).stdout.split() if "=" in word)
        return f"{shown['JobState']} {shown['Reason']}" if shown["JobState"] == "PENDING" else shown["JobState"]


def write_settings(folder: Path, encoded: Path, **changes: Any) -> Path:
    """Configuration in `folder` of a run that can train at once."""
    return reusing(encoded, folder, **merged(SETTINGS, changes))


def undisturbed_curve(folder: Path, encoded: Path, **changes: Any) -> dict[int, dict[str, Any]]:
    """The curve of such a run as one process on this box trains it, by step."""
    config = write_settings(folder, encoded, **changes)
    run_stage("train", config)
    return {record["step"]: record for record in curve(config)}


class OnCluster:
    """A run whose jobs are on a cluster, to be waited for and told about."""

    def __init__(self, cluster: Cluster, run: Path) -> None:
        self.cluster, self.run = cluster, run

    def call(self, *command: str, expect: int = 0, **how: Any) -> str:
        """Call a program, which is to end with this exit status; all that it printed."""
        answer = self.cluster.run(*command, check=False, **how)
        assert answer.returncode == expect, f"{command}\n{answer.stdout}{answer.stderr}\n{self.story()}"
        return answer.stdout + answer.stderr

    def note(self, step: int) -> Path:
        """What rank 0 makes when it waits before a step."""
        return self.run / f"train/faults/wait-rank0-step{step}"

    def until(self, condition: Callable[[], T], what: str) -> T:
        """Wait for `condition()`; if that is in vain, tell what happened."""
        return wait_for(condition, lambda: f"{what}\n{self.story()}")

    def next(self, condition: Callable[[], T], what: str) -> T:
        """Wait for what a job brings about, but not when there is none left that could."""
        def brought() -> T:
            if result := condition():
                return result
            idle, result = self.cluster.is_idle(), condition()
            assert result or not idle, f"the jobs ended without {what}\n{self.story()}"
            return result

        return self.until(brought, what)

    def events(self, kind: str) -> list[dict[str, Any]]:
        """What the jobs of train recorded."""
        return [event for event in read_attempts(self.run) if (event["event"], event["stage"]) == (kind, "train")]

    def story(self) -> str:
        """The queue and all logs, for a failed assertion."""
        queue = self.cluster.run("squeue", check=False)
        logs = [*self.run.glob("launch/submitit/*.out"), *self.run.glob("logs/**/*[0-9].log")]
        paths = [self.run / "train/STATE.json", *sorted(logs)]
        return "\n".join([f"{queue.stdout}{queue.stderr}{self.cluster.node_states()}", *(
            f"==> {path}\n{path.read_text(errors='replace')[-3000:]}" for path in paths if path.is_file())])


class Training(OnCluster):
    """A run of the train stage on a cluster.

    Args:
        whole: the curve of the same training that nobody disturbed, by step.
        faults: what is to happen by itself (tests/faulty.py); by default rank 0 waits.
        changes: of the configuration.

    Attributes:
        last: the record of the start in which rank 0 was last seen to wait.
    """

    def __init__(self, cluster: Cluster, folder: Path, encoded: Path, whole: dict[int, dict[str, Any]], *,
                 faults: str | None = None, **changes: Any) -> None:
        super().__init__(cluster, folder / "runs/mini")
        self.whole, self.broken, self._waited, self._ended = whole, "", 0, 0
        self.last: dict[str, Any] = {}
        waits = "; ".join(f"wait:rank=0,step={step}" for step in WAITS)
        switch = merged(PLUGIN, {"launch": {"environment": {"DROVER_FAULTS": waits if faults is None else faults}}})
        self.config = write_settings(folder, encoded, **merged(switch, changes))
        self.environment = environment()

    # ---- what a user does

    def launcher(self, *arguments: str, expect: int = 0) -> str:
        """Call launch/submit.py; all that it printed."""
        return self.call(sys.executable, "launch/submit.py", *arguments, expect=expect, cwd=REPOSITORY,
                         variables=self.environment)

    def drover(self, *arguments: str) -> str:
        """Call another command; all that it printed."""
        return self.call(sys.executable, "-m", "drover", *arguments, cwd=REPOSITORY, variables=self.environment)

    def submit(self, *overrides: str, stages: str = "train", nodes: int = 2) -> str:
        """Submit the run; what was printed."""
        return self.launcher("--config", str(self.config), "--stage", stages, "--nodes", str(nodes), "--cluster",
                             "lab", *overrides)

    def next_wait(self) -> int:
        """Wait until rank 0 waits before a step where it has not waited yet; which one that is."""
        self._waited = self.next(lambda: next((step for step in WAITS if step > self._waited and
                                               self.note(step).exists()), 0), "rank 0 to wait before a step")
        self.last = self.starts[-1]
        return self._waited

    def go_on(self, *, to_the_end: bool = False) -> None:
        """Let rank 0 go on from where it waits, to where it does next."""
        for step in WAITS if to_the_end else [self._waited]:
            note = self.note(step)
            note.parent.mkdir(parents=True, exist_ok=True)
            note.with_name(note.name + GO).touch()

    def next_end(self) -> SimpleNamespace:
        """Wait for the end of another start."""
        self._ended = len(self.next(lambda: self.ends[self._ended:], "the end of a start")) + self._ended
        return self.ends[-1]

    def next_start(self, *, requeued: bool = False) -> dict[str, Any]:
        """Wait for the start after that in which rank 0 was last seen to wait; the record of it. requeued: it is of the
        same job, queued again. Slurm may count starts that reached no runner: on a node that was not ready."""
        start = self.next(lambda: self.starts[self.starts.index(self.last) + 1:], "another start")[0]
        assert not requeued or (start["job"] == self.last["job"] and start["restart"] > self.last["restart"]), start
        return start

    # ---- how it stands

    def job(self, stage: str = "train") -> str:
        """Id of a stage's job, of the newest submission."""
        jobs = read_json(self.run / "launch/chain.json")["jobs"]
        return next(job["id"] for job in jobs if job["stage"] == stage)

    def saved(self) -> list[Path]:
        """The whole checkpoints, oldest first."""
        return complete_checkpoints(self.run / "train")

    @property
    def state(self) -> StageState | None:
        """The last word of training."""
        return read_state(self.run / "train")

    @property
    def ends(self) -> list[SimpleNamespace]:
        """How the starts of train ended so far, as the runner noted it."""
        return [SimpleNamespace(**event) for event in self.events("ended")]

    @property
    def starts(self) -> list[dict[str, Any]]:
        """The starts of train so far."""
        return self.events("attempt")

    def running(self, word: str, variable: str = "") -> set[int]:
        """Processes of the train job with this word in their command, and a variable in their environment."""
        marks = {f"SLURM_JOB_ID={self.job()}", *filter(None, [variable])}
        return {pid for pid in job_processes(self.cluster)
                if marks <= set(process_words(pid, "environ")) and word in process_words(pid, "cmdline")}

    def process(self, word: str = "submitit.core._submit", variable: str = "") -> int:
        """Process id of the runner of the train job, or of another process."""
        result = self.running(word, variable)
        top, = [pid for pid in result if psutil.Process(pid).ppid() not in result]
        return top

    def rank(self, number: int) -> int:
        """Process id of a rank of the step that runs."""
        return self.process("drover.pipeline.train", f"RANK={number}")

    def log(self, stage: str = "train") -> str:
        """What the newest job of a stage said."""
        path = self.run / f"launch/submitit/{self.job(stage)}_0_log.out"
        return path.read_text() if path.exists() else ""

    def output(self) -> str:
        """What the first node's ranks of the newest start printed."""
        return (self.run / "logs/train/{job}.{start}/node0.log".format(**self.starts[-1])).read_text()

    # ---- the end

    def wait_until_gone(self) -> None:
        """Wait until nothing is in the queue and nothing runs on the nodes."""
        self.until(self.cluster.is_idle, "an empty queue")
        self.until(lambda: not job_processes(self.cluster), "nodes without processes")

    def finish(self) -> None:
        """Go on to the end, and check that training is done, as if nobody had disturbed it."""
        self.go_on(to_the_end=True)
        self.wait_until_gone()
        assert self.state.status == "done", self.story()
        assert read_manifest(self.run / "train").counts["steps"] == STEPS, self.story()
        self.check_curve()
        assert {record["step"] for record in curve(self.config)} == set(self.whole)

    def check_curve(self) -> None:
        """What was trained so far is what the undisturbed training did, and every sample came once."""
        assert proven(self.config), self.story()
        assert difference(lines(self.config), self.whole) < 1e-12, self.story()


def in_order(run: Training, request: pytest.FixtureRequest) -> Iterator[Training]:
    """For tests that each begin where the one before left a run: once one has failed, none can begin."""
    if run.broken:
        pytest.skip(f"the run of these tests failed in {run.broken}")
    failed = request.session.testsfailed
    yield run
    if request.session.testsfailed > failed:
        run.broken = request.node.name


def job_processes(cluster: Cluster) -> set[int]:
    """What runs on the cluster's nodes for jobs: batch scripts, runners, srun, ranks."""
    mark = f"SLURM_CONF={cluster.environment()['SLURM_CONF']}"
    return {pid for pid in psutil.pids() if mark in (variables := process_words(pid, "environ"))
            and any(word.startswith("SLURM_JOB_ID=") for word in variables)}


def clear(cluster: Cluster) -> None:
    """Bring back what was stopped, and cancel whatever is left."""
    cluster.start_controller()
    cluster.start_accounting()
    for node, state in cluster.node_states().items():
        if is_lost(state):
            cluster.start_node(node)

    def empty() -> bool:
        """Cancel and kill until nothing is left: a job whose runner is killed may queue itself again."""
        if cluster.is_idle():
            return True
        cluster.cancel_all()
        for pid in job_processes(cluster):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return False

    wait_for(empty, lambda: cluster.run("squeue").stdout)


def guard(folder: Path) -> subprocess.Popen[bytes]:
    """A process that takes the lab in `folder` down when this process is gone, killed before it could do so itself."""
    code = ("import os, sys, time\nfrom tests.slurm_lab import Lab\n"
            "while os.getppid() == int(sys.argv[2]):\n    time.sleep(0.5)\nLab(sys.argv[1]).down()")
    return subprocess.Popen([sys.executable, "-c", code, str(folder), str(os.getpid())], cwd=REPOSITORY,
                            start_new_session=True, stdin=subprocess.DEVNULL)
