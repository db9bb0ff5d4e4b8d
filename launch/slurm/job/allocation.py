"""Where and as what a job runs: from Slurm's variables in the batch step."""

from __future__ import annotations

import socket
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from secrets import token_hex
from typing import Any

from launch.slurm.jobspec import JobSpec
from launch.slurm.nodes import address
from launch.slurm.scheduler import UNKNOWN, Scheduler
from pipeline.contract.signed import SECRET
from pipeline.errors import UserError

PORTS = range(20000, 30000)
"""Below the ports that the kernel hands out by itself (32768 and up)."""
RUNNING = ("RUNNING", "SUSPENDED", "STOPPED", "SIGNALING", "RESIZING", "CONFIGURING")
"""States of a job that has its nodes and is to keep them."""


@dataclass(frozen=True)
class Allocation:
    """A job's place.

    job: SLURM_JOB_ID. name: what people call it; of an array's element `<array id>_<index>`. restart: how often Slurm
    queued it again. index: of the element; None for a job that is no array.
    """

    job: str
    name: str
    restart: int
    nodes: tuple[str, ...]
    index: int | None = None

    @classmethod
    def from_environment(cls, environment: Mapping[str, str], scheduler: Scheduler) -> Allocation:
        """UserError outside of a job."""
        if "SLURM_JOB_ID" not in environment:
            raise UserError("launch.slurm.job.runner is what a Slurm job runs; `python launch/submit.py` makes jobs.")
        job, element = environment["SLURM_JOB_ID"], environment.get("SLURM_ARRAY_TASK_ID")
        name = job if element is None else f"{environment.get('SLURM_ARRAY_JOB_ID', job)}_{element}"
        return cls(job, name, int(environment.get("SLURM_RESTART_COUNT") or 0),
                   tuple(scheduler.hostnames(environment.get("SLURM_JOB_NODELIST", ""))),
                   None if element is None else int(element))

    def part(self, parts: int, phase: str = "") -> list[str]:
        """What the stage's command gets for an element of an array."""
        which = ["--phase", phase] if phase else []
        return [] if self.index is None else ["--part", f"{self.index}/{parts}", *which]

    def next_start(self, attempts: Iterable[dict[str, Any]], logs: Path) -> int:
        """Number of the next start of this job, over all its restarts: none that was logged or left a folder."""
        numbers = [int(event["start"]) for event in attempts
                   if event.get("job") == self.name and event["event"] == "attempt"]
        numbers += [int(number) for path in logs.glob(f"{self.name}.*")
                    if (number := path.name.removeprefix(f"{self.name}.")).isdigit()]
        return max(numbers, default=-1) + 1

    def unfinished(self, attempts: Iterable[dict[str, Any]]) -> dict[str, Any] | None:
        """The newest start of this job, or of its runner, if nothing says how it ended."""
        mine = [event for event in attempts if event.get("job") == self.name]
        return mine[-1] if mine and mine[-1]["event"] in ("job", "attempt") else None

    def is_current(self, scheduler: Scheduler) -> bool:
        """Whether Slurm still holds this start of the job for one that runs; so it is where Slurm does not answer.

        A node that Slurm gave up may run what it was given for long. A step that it asks for under the job's id would
        get the nodes of the job's next start.
        """
        found = scheduler.jobs([self.name])
        if found is None or (job := found[self.name]).state == UNKNOWN:
            return True
        return job.state in RUNNING and job.restarts == self.restart

    def rendezvous(self, spec: JobSpec, number: int, scheduler: Scheduler) -> dict[str, str]:
        """Where the ranks of a step meet, and the secret with which they sign what they tell each other there. Each
        start gets a port of its own: the last one's may still be closing."""
        return {"MASTER_ADDR": address(self.nodes[0], scheduler), "MASTER_PORT": str(free_port(int(self.job), number)),
                "DROVER_RANKS": str(spec.ranks), "DROVER_GPUS": str(spec.gpus_per_node), SECRET: token_hex(32)}


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
