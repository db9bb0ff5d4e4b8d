"""What a job does, and where it runs. The runner needs no more of Slurm or of this machine."""

from __future__ import annotations

import signal
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from drover.launch.processes import Each, Environment
from drover.launch.slurm.scheduler import UNKNOWN, WITH_NODES, JobInfo, Scheduler


@dataclass(frozen=True)
class JobSpec:
    """What a job does. A planned job (`drover.launch.plan.Job`) adds its place in the plan.

    Attributes:
        run: absolute path of the run folder.
        chain: id of the submission; `--force` counts once for it.
        name: Slurm's name of the job.
        command: of the stage, without what only the job knows (its name, its rank).
        ranks: processes under torch.distributed over all nodes; 0 for a stage without ranks.
        nodes: of a start. spare_nodes: nodes of the job beyond that number.
        wrap: a command that starts the stage, such as a container's. srun_args: more options of srun.
        health_check: a site's test of a node.
        requeue: whether the job may requeue itself.
        signal_s: seconds before the time limit at which Slurm signals the ranks to save and end.
        max_restarts: restarts in a row without a new checkpoint after which the stage fails.
        code: folder of the copy of the code.
        files: hashes of other files that decide what the job does: the frozen configuration, its plugins, and the
            modules in their folders.
        check_owners: whether others must not own or write what is executed (`drover.launch.slurm.trust`).
    """

    name: str
    stage: str
    command: tuple[str, ...]
    run: str
    chain: str
    environment: dict[str, str] = field(default_factory=dict)
    ranks: int = 0
    nodes: int = 1
    spare_nodes: int = 0
    tasks_per_node: int = 1
    cpus_per_task: int = 1
    gpus_per_node: int = 0
    wrap: tuple[str, ...] = ()
    srun_args: tuple[str, ...] = ()
    health_check: tuple[str, ...] = ()
    requeue: bool = True
    signal_s: int = 120
    max_restarts: int = 3
    preflight: bool = False
    code: str = ""
    files: dict[str, str] = field(default_factory=dict)
    check_owners: bool = True

    @property
    def folder(self) -> Path:
        """The stage's folder."""
        return Path(self.run) / self.stage


@dataclass(frozen=True)
class StepEnd:
    """How the processes of a start ended.

    status: of the first that failed, or of the program that started them (128 + n for signal n). Do not rely on it.
    cause: what is known, in a few words; empty if nothing.
    rank: the first that failed. exit_code: its exit status if it exited by itself; then its last line says why.
    lost: nodes that failed, according to Slurm.
    started: whether there were processes at all. abandoned: whether some may still run.
    """

    status: int
    cause: str = ""
    rank: int = 0
    exit_code: int | None = None
    lost: tuple[str, ...] = ()
    started: bool = True
    abandoned: bool = False


def process_end(status: int) -> StepEnd:
    """How a process with this exit status ended. srun's own statuses may lie among those of signals."""
    names = {128 + number: f"killed by {number.name}" for number in signal.Signals}
    return StepEnd(status, names.get(status, ""), exit_code=status if 0 < status < 128 else None)


@dataclass
class Host(ABC):
    """Where a job runs: how processes are started there, and what is known about the nodes.

    Attributes:
        job: SLURM_JOB_ID, empty outside of Slurm. name: the job's id for people; `<array id>_<index>` for an element of
            an array.
        restart: how often Slurm requeued the job. index: of the array element; None for a job that is no array.
        scheduler: gave the nodes. It answers how much time is left and how nodes are, and requeues the job. With one
            that never answers (`NoScheduler`) a job continues.
        requests: signals that asked the job to end, in order of arrival.
        avoid: nodes that failed a start or the preflight of this job.
        tells_refusals: whether the stage's state may say that it refused to start.
    """

    tells_refusals: ClassVar[bool] = True
    job: str
    name: str
    restart: int
    nodes: tuple[str, ...]
    index: int | None
    scheduler: Scheduler
    requests: list[int] = field(default_factory=list)
    avoid: set[str] = field(default_factory=set)

    @abstractmethod
    def start(self, spec: JobSpec, command: Sequence[str], environment: Environment, folder: Path,
              each: Each) -> StepEnd:
        """Start `command` once per rank (once for a stage without ranks) and wait until all have ended. The host says
        where the ranks meet.

        The first rank that fails ends the others, and no rank outlives this process. `each` is called meanwhile; if it
        returns False, the ranks are ended. The output goes to files in `folder` (`drover.launch.slurm.start_logs`).
        """

    @abstractmethod
    def say(self, text: str, *, quiet: bool = False) -> None:
        """Write a line to the job's log. quiet: not to the terminal."""

    def ready(self, spec: JobSpec) -> bool:
        """Called before each start: choose its nodes; whether enough are left."""
        return True

    def has_others(self, spec: JobSpec) -> bool:
        """Whether the job has enough nodes besides those in `avoid`."""
        return False

    def requeue(self) -> str | None:
        """Queue the job again, which ends this process; or None if that is about to happen, else why it cannot."""
        return "nothing queues jobs here"

    def is_current(self) -> bool:
        """Whether this start of the job is the one that the scheduler runs; True if the scheduler does not answer.

        A node that Slurm has given up may keep running for long. A step that it requests under the job's id would get
        the nodes of the job's next start.
        """
        job = self.info()
        return job.state == UNKNOWN or (job.state in WITH_NODES and job.restarts == self.restart)

    def info(self) -> JobInfo:
        """The scheduler's view of this job; an unknown job if it does not answer."""
        return (self.scheduler.jobs([self.name]) or {}).get(self.name, JobInfo(self.name))

    def pause(self, seconds: float, each: Each) -> None:
        """Wait, unless a request to end comes. `each` is called meanwhile."""
        until = time.monotonic() + seconds
        while time.monotonic() < until and not self.requests:
            each()
            time.sleep(0.25)
