"""Where a job runs: what the runner asks of Slurm, of this box, or of anything else that can start processes."""

from __future__ import annotations

import math
import socket
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from pipeline.errors import UserError

if TYPE_CHECKING:
    from launch.slurm.job.srun import StepEnd
    from launch.slurm.jobspec import JobSpec

PORTS = range(20000, 30000)
"""Below the ports that the kernel hands out by itself (32768 and up)."""


class Job(Protocol):
    """What starts and hosts know of the job that they work for.

    Attributes:
        stopping: whether it was told to end.
    """

    @property
    def stopping(self) -> bool: ...

    def say(self, text: str, *, quiet: bool = False) -> None:
        """One line of the job's log. quiet: a person who watches needs no such line."""

    def tick(self) -> bool:
        """Called while something runs; False if it must end because the stage is another start's."""

    def pause(self, seconds: float) -> None:
        """Wait, but not when told to end."""


@dataclass(frozen=True)
class Allocation:
    """A job's place.

    job: SLURM_JOB_ID, empty outside of Slurm. name: what people call it; of an array's element `<array id>_<index>`.
    restart: how often Slurm queued it again. index: of the element; None for a job that is no array.
    """

    job: str
    name: str
    restart: int
    nodes: tuple[str, ...]
    index: int | None = None

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


class Host(ABC):
    """What the runner needs. All but `start` and `say` has an answer for hosts without a scheduler.

    here: name of the job, its nodes.
    """

    here: Allocation

    @abstractmethod
    def start(self, spec: JobSpec, command: Sequence[str], environment: Mapping[str, str], folder: Path,
              job: Job) -> StepEnd:
        """Start `command` once per rank (once, for a stage without ranks) and wait for the end of all. The first rank
        that fails ends the others, and no rank outlives this process. Output goes to files in `folder`."""

    @abstractmethod
    def say(self, text: str, *, quiet: bool = False) -> None:
        """One line of the job's log. quiet: a person who watches needs no such line."""

    @abstractmethod
    def rendezvous(self, spec: JobSpec, number: int) -> dict[str, str]:
        """Variables that tell the ranks of start `number` where they meet. Each start gets a port of its own: the last
        one's may still be closing."""

    @abstractmethod
    def last_words(self, folder: Path, end: StepEnd, count: int) -> list[str]:
        """The last lines of the first failing rank, from the files that `start` left in `folder`."""

    def is_current(self) -> bool:
        """Whether the job still has its nodes."""
        return True

    def seconds_left(self) -> float:
        """Until the job's time limit."""
        return math.inf

    def requeue(self) -> str | None:
        """Queue the job again; why that cannot be, or None."""
        return "there is no queue"

    def failed_nodes(self, nodes: Iterable[str]) -> dict[str, str]:
        """Those of `nodes` that are down, each with the scheduler's word for it."""
        return {}

    def leave_out(self, job: str, nodes: Iterable[str]) -> str | None:
        """Let the waiting `job` do without nodes; why that cannot be, or None."""
        return None


_held: list[socket.socket] = []


def free_port(job: int, number: int) -> int:
    """A port for start `number` of a job, which nobody listens on here, on the first node.

    Jobs beside each other on a node, and starts of one job, get different ones. It is held until the next is asked for,
    bound without listening: the ranks listen some seconds later only, and others may look for a port meanwhile.
    """
    while _held:
        _held.pop().close()
    for attempt in range(100):
        port = PORTS[(job * 37 + number + attempt * 1009) % len(PORTS)]
        probe = socket.socket()
        try:
            probe.bind(("", port))
        except OSError:
            probe.close()
            continue
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the rank does: it may bind beside this
        _held.append(probe)
        return port
    raise UserError(f"This node has no free port among {PORTS.start}-{PORTS.stop - 1} for the ranks to meet on.")
