"""Where a job runs: what the runner asks of Slurm, of this box, or of anything else that can start processes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launch.slurm.scheduler import UNKNOWN, Scheduler

if TYPE_CHECKING:
    from launch.slurm.job.runner import Runner
    from launch.slurm.job.srun import StepEnd
    from launch.slurm.jobspec import JobSpec

RUNNING = ("RUNNING", "SUSPENDED", "STOPPED", "SIGNALING", "RESIZING", "CONFIGURING")
"""States of a job that has its nodes and is to keep them."""


@dataclass
class Host(ABC):
    """A job's place: how its processes are started there, and what is known of it.

    Attributes:
        job: SLURM_JOB_ID, empty outside of Slurm. name: what people call it; of an array's element
            `<array id>_<index>`.
        restart: how often Slurm queued it again. index: of the element; None for a job that is no array.
        scheduler: who has given the nodes, and is asked for the time that is left, for the state of nodes, and to queue
            the job again. One that never answers (`NoScheduler`) lets a job go on.
    """

    job: str
    name: str
    restart: int
    nodes: tuple[str, ...]
    index: int | None
    scheduler: Scheduler

    @abstractmethod
    def start(self, spec: JobSpec, command: Sequence[str], environment: Mapping[str, str], folder: Path,
              job: Runner) -> StepEnd:
        """Start `command` once per rank (once, for a stage without ranks) and wait for the end of all.

        The first rank that fails ends the others, and no rank outlives this process. `job.tick` is called meanwhile.
        The output goes to files in `folder` (`launch.slurm.start_logs`).
        """

    @abstractmethod
    def say(self, text: str, *, quiet: bool = False) -> None:
        """One line of the job's log. quiet: a person who watches needs no such line."""

    def rendezvous(self, spec: JobSpec, number: int) -> dict[str, str]:
        """Variables that tell the ranks of start `number` where they meet, unless `start` does. Each start gets a port
        of its own: the last one's may still be closing."""
        return {}

    def part(self, parts: int, phase: str = "") -> list[str]:
        """What the stage's command gets for an element of an array."""
        which = ["--phase", phase] if phase else []
        return [] if self.index is None else ["--part", f"{self.index}/{parts}", *which]

    def next_start(self, attempts: Iterable[dict[str, Any]], logs: Path) -> int:
        """Number of this job's next start of the stage that has its logs in the folder `logs`, over all its restarts:
        none that was logged or left a folder."""
        numbers = [int(event["start"]) for event in attempts
                   if (event.get("job"), event.get("stage"), event["event"]) == (self.name, logs.name, "attempt")]
        numbers += [int(number) for path in logs.glob(f"{self.name}.*")
                    if (number := path.name.removeprefix(f"{self.name}.")).isdigit()]
        return max(numbers, default=-1) + 1

    def unfinished(self, attempts: Iterable[dict[str, Any]], chain: str) -> dict[str, Any] | None:
        """The newest start of this job, or of its runner, if nothing says how it ended."""
        mine = [event for event in attempts if (event.get("job"), event.get("chain")) == (self.name, chain)]
        return mine[-1] if mine and mine[-1]["event"] in ("job", "attempt") else None

    def is_current(self) -> bool:
        """Whether the scheduler still holds this start of the job for one that runs; so it is where it does not answer.

        A node that Slurm gave up may run what it was given for long. A step that it asks for under the job's id would
        get the nodes of the job's next start.
        """
        found = self.scheduler.jobs([self.name])
        if found is None or (job := found[self.name]).state == UNKNOWN:
            return True
        return job.state in RUNNING and job.restarts == self.restart
