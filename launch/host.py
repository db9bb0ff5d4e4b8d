"""Where a job runs: what the runner asks of Slurm, of this box, or of anything else that can start processes."""

from __future__ import annotations

import signal
import time
from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from secrets import token_hex
from typing import ClassVar

from drover.launch.processes import Each, Environment
from drover.launch.slurm.job.joblock import JobLock
from drover.launch.slurm.jobspec import JobSpec
from drover.launch.slurm.scheduler import UNKNOWN, WITH_NODES, JobInfo, Scheduler
from drover.pipeline.contract.signed import SECRET


@dataclass(frozen=True)
class StepEnd:
    """How the processes of a start ended.

    status: of the first that failed, or of what started them (128 + n for signal n), nothing to rely on.
    cause: what is known, in a few words; empty if nothing.
    rank: the first that ended badly. exit_code: its exit status, if it chose to end, so that its last words say why.
    lost: nodes that Slurm says failed.
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
    """How a process ended that has this exit status."""
    killed = f"killed by {signal.Signals(status - 128).name}" if 128 < status < 128 + signal.NSIG else ""
    return StepEnd(status, killed, exit_code=status if 0 < status < 128 else None)


def meeting(spec: JobSpec, address: str, port: int) -> dict[str, str]:
    """Variables that tell ranks where they meet. They sign what they leave in their store with the secret."""
    return {"MASTER_ADDR": address, "MASTER_PORT": str(port), "DROVER_RANKS": str(spec.ranks),
            "DROVER_GPUS": str(spec.gpus_per_node), SECRET: token_hex(32)}


@dataclass
class Host(ABC):
    """A job's place: how its processes are started there, and what is known of it.

    Attributes:
        job: SLURM_JOB_ID, empty outside of Slurm. name: what people call it; of an array's element
            `<array id>_<index>`.
        restart: how often Slurm queued it again. index: of the element; None for a job that is no array.
        scheduler: who has given the nodes, and is asked for the time that is left, for the state of nodes, and to queue
            the job again. One that never answers (`NoScheduler`) lets a job go on.
        asked: the signals that told the job to end, as they come.
    """

    job: str
    name: str
    restart: int
    nodes: tuple[str, ...]
    index: int | None
    scheduler: Scheduler
    asked: list[int] = field(default_factory=list)
    in_place: ClassVar[bool] = False
    """Whether a job that is to be queued again begins again here, since the place itself waits for nodes."""

    def ready(self, spec: JobSpec, each: Each) -> JobSpec:
        """Called before each start: wait until there are nodes for it, if need be; the stage as it runs on them."""
        return spec

    def does_without(self, nodes: Collection[str]) -> bool:
        """Whether the next start leaves these nodes out."""
        return False

    @abstractmethod
    def start(self, spec: JobSpec, command: Sequence[str], environment: Environment, folder: Path,
              each: Each) -> StepEnd:
        """Start `command` once per rank (once, for a stage without ranks) and wait for the end of all.

        The first rank that fails ends the others, and no rank outlives this process. `each` is called meanwhile; if it
        answers False, the ranks are ended. The output goes to files in `folder` (`drover.launch.slurm.start_logs`).
        """

    @abstractmethod
    def say(self, text: str, *, quiet: bool = False) -> None:
        """One line of the job's log. quiet: a person who watches needs no such line."""

    def lock(self, spec: JobSpec) -> JobLock | None:
        """What keeps other jobs from the stage; None where the stage's own lock is enough."""
        return None

    def rendezvous(self, spec: JobSpec) -> dict[str, str]:
        """Variables that tell the ranks of a start where they meet, unless `start` does. Each start gets a port of its
        own: the last one's may still be closing."""
        return {}

    def is_current(self) -> bool:
        """Whether the scheduler still holds this start of the job for one that runs; so it is where it does not answer.

        A node that Slurm gave up may run what it was given for long. A step that it asks for under the job's id would
        get the nodes of the job's next start.
        """
        job = self.seen()
        return job.state == UNKNOWN or (job.state in WITH_NODES and job.restarts == self.restart)

    def seen(self) -> JobInfo:
        """How the scheduler sees this job; as one that it does not know where it does not answer."""
        return (self.scheduler.jobs([self.name]) or {}).get(self.name, JobInfo(self.name))

    def pause(self, seconds: float, each: Each) -> None:
        """Wait, but not when told to end. `each` is called meanwhile."""
        until = time.monotonic() + seconds
        while time.monotonic() < until and not self.asked:
            each()
            time.sleep(0.25)
