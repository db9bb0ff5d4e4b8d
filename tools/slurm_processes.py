"""The processes of a Slurm lab: started by it, found again later, stopped, and never mistaken for somebody else's."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")


@dataclass(frozen=True)
class Process:
    """A line of the process table. `started` (clock ticks since boot) tells it from a later process with its id."""

    id: int
    parent: int
    started: int


def process_table() -> dict[int, Process]:
    """All processes of the machine but those that have ended and only wait to be reaped."""
    found = (_process(int(entry.name)) for entry in PROC.iterdir() if entry.name.isdigit())
    return {process.id: process for process in found if process is not None}


def descendants(roots: Iterable[int], table: Mapping[int, Process]) -> set[int]:
    """The given processes and all that they started, as far as the parents between them still live."""
    children: dict[int, list[int]] = {}
    for process in table.values():
        children.setdefault(process.parent, []).append(process.id)
    found: set[int] = set()
    waiting = list(roots)
    while waiting:
        if (identity := waiting.pop()) not in found:
            found.add(identity)
            waiting += children.get(identity, [])
    return found


def send(identity: int, number: int) -> None:
    """A signal to a process, which may have ended meanwhile."""
    with suppress(ProcessLookupError):
        os.kill(identity, number)


class Daemons:
    """The daemons of the lab in `folder`: `pids/<name>` holds the id and the starting time of each."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.children: list[subprocess.Popen[bytes]] = []

    def start(self, name: str, command: list[str], environment: Mapping[str, str]) -> None:
        """Start a daemon in a session of its own; what it says before its own log opens is in log/<name>.out."""
        with open(self.folder / "log" / f"{name}.out", "ab") as out:
            child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, cwd=self.folder,
                                     env=dict(environment), start_new_session=True)
        self.children.append(child)
        process = _process(child.pid)
        (self.folder / "pids" / name).write_text(f"{child.pid} {process.started if process else 0}\n")

    def names(self) -> list[str]:
        """The daemons that were started and not stopped, whether they live or not."""
        folder = self.folder / "pids"
        return sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []

    def running(self, name: str) -> int | None:
        """The process id of a daemon, None if it was not started or has died."""
        for child in self.children:
            child.poll()  # reap it, if it is ours and has ended
        try:
            identity, started = map(int, (self.folder / "pids" / name).read_text().split())
        except (FileNotFoundError, ValueError):
            return None
        process = _process(identity)
        return identity if process is not None and process.started == started else None

    def stop(self, name: str, grace_s: float = 0.0) -> None:
        """End a daemon: asked to, and killed when it has not gone after `grace_s` seconds (0: killed at once)."""
        identity = self.running(name)
        if identity is not None:
            send(identity, signal.SIGTERM if grace_s else signal.SIGKILL)
            deadline = time.monotonic() + grace_s
            while self.running(name) is not None:
                if time.monotonic() > deadline:
                    send(identity, signal.SIGKILL)
                time.sleep(0.02)
        (self.folder / "pids" / name).unlink(missing_ok=True)

    def job_processes(self, nodes: Iterable[str]) -> set[int]:
        """What runs on the given nodes for jobs: Slurm's step daemons, all below them, and what has escaped those.

        A step daemon overwrites its command line and environment, but holds the log of its node open; the processes
        of a job carry the name of their node and our slurm.conf in their environment.
        """
        logs = {str(self.folder / "log" / f"slurmd-{node}.log") for node in nodes}
        marks = {f"SLURMD_NODENAME={node}".encode() for node in nodes}
        ours = f"SLURM_CONF={self.folder / 'slurm.conf'}".encode()
        table = process_table()
        roots = {identity for identity in table if _is_step_daemon(identity, logs)}
        roots |= {identity for identity in table if ours in (variables := _environment(identity)) and marks & variables}
        return descendants(roots, table) - {os.getpid()}

    def kill_jobs(self, nodes: Iterable[str], limit_s: float = 300.0) -> None:
        """SIGKILL for everything that runs on the nodes, until nothing is left.

        All of it is stopped before any of it is killed, as when power is lost: a step daemon that saw its script die
        would tell the controller that the job has failed.

        Raises:
            TimeoutError: some process cannot be killed.
        """
        nodes, deadline = list(nodes), time.monotonic() + limit_s
        while found := self.job_processes(nodes):
            for number in (signal.SIGSTOP, signal.SIGKILL):
                for identity in sorted(found):  # step daemons first, as a rule: they are the parents
                    send(identity, number)
            if time.monotonic() > deadline:
                raise TimeoutError(f"processes {sorted(found)} of {self.folder} do not die")
            time.sleep(0.02)


def _process(identity: int) -> Process | None:
    try:
        fields = (PROC / str(identity) / "stat").read_text().rsplit(")", 1)[1].split()
    except (OSError, IndexError):
        return None
    return None if fields[0] in "ZX" else Process(identity, int(fields[1]), int(fields[19]))


def _is_step_daemon(identity: int, logs: set[str]) -> bool:
    folder = PROC / str(identity)
    try:
        if not (folder / "exe").readlink().name.startswith("slurmstepd"):
            return False
        return any(_target(link) in logs for link in (folder / "fd").iterdir())
    except OSError:  # it has ended, or is another user's
        return False


def _target(link: Path) -> str:
    try:
        return str(link.readlink())
    except OSError:
        return ""


def _environment(identity: int) -> set[bytes]:
    try:
        return set((PROC / str(identity) / "environ").read_bytes().split(b"\0"))
    except OSError:
        return set()
