"""Calls Slurm's programs, each within a time limit, and says what their answers mean.

Nothing here raises because of Slurm: a program that is missing, hangs, or cannot reach its daemon is an ordinary
result. `squeue` comes first, because it answers without an accounting database. Its output is read in columns of fixed
width, the one form that all versions share (`--json` differs between them).
"""

from __future__ import annotations

import os
import re
import socket
import subprocess
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import accumulate
from math import inf
from pathlib import Path

from drover.launch.processes import Environment, answer_of
from drover.pipeline.core.console import counted, seconds_of

UNKNOWN = "unknown"
"""State of a job that Slurm does not know, or no longer knows."""
ENDED = frozenset(("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY",
                   "PREEMPTED", "REVOKED", "TIMEOUT", UNKNOWN))
"""States of jobs that have ended. A job in any other state counts as queued."""
WITH_NODES = ("RUNNING", "SUSPENDED", "STOPPED", "SIGNALING", "RESIZING", "CONFIGURING")
"""States of a job that has its nodes and will keep them."""
EXPECTED = ("", "Dependency", "JobArrayTaskLimit", "Singleton")
"""Reasons (JOB REASON CODES of `man squeue`) with which a job waits as planned."""
NEVER = {"DependencyNeverSatisfied": "the end of the job before it", "PartitionNodeLimit": "--nodes or partition",
         "PartitionTimeLimit": "time or partition", "BadConstraints": "constraint, gpu_type or extra",
         "InvalidAccount": "account", "InvalidQOS": "qos"}
"""Reasons with which a job never starts, and what to change: settings of `launch`, mostly."""
OUT_OF_MEMORY = "(?i)oom.kill|(?<!cuda )(?<!hip )out of memory|exceeded (job |step )?memory limit"
"""Slurm's words where a process exceeded the memory of its job. A full GPU needs other advice."""
RANKS = {**dict.fromkeys(ENDED, 5), "RUNNING": 0, "COMPLETING": 1, "CONFIGURING": 2, "PENDING": 4, "COMPLETED": 6,
         UNKNOWN: 6}
"""Ranks of states: the state with the lowest rank is that of a whole array. Other states of queued jobs have 3."""
COLUMNS = (("JobArrayID", 40), ("State", 20), ("Reason", 200), ("NodeList", 400), ("TimeUsed", 20), ("RestartCnt", 10),
           ("Name", 200), ("Comment", 200), ("TimeLeft", 20))
ENDS = tuple(accumulate(width for _, width in COLUMNS))
GPUS = re.compile(r"\bgpu(?:(?::[^,:(]+)?:(\d+))?")
"""GPUs in a list of resources such as `gpu:h100:8(S:0-1),nvme:1`, with their number."""


@dataclass(frozen=True)
class JobInfo:
    """A job, an element of an array, or a whole array.

    state: Slurm's term in capitals (RUNNING, PENDING, COMPLETED ...), or `unknown`.
    reason: why it waits or ended. nodes: in Slurm's notation. elapsed_s: of this start. left_s: until Slurm ends it.
    """

    id: str
    state: str = UNKNOWN
    reason: str = ""
    nodes: str = ""
    elapsed_s: float = 0
    restarts: int = 0
    name: str = ""
    comment: str = ""
    left_s: float = inf

    @property
    def queued(self) -> bool:
        """Whether it is still in the queue, running or not."""
        return self.state not in ENDED


@dataclass(frozen=True)
class NodeKind:
    """Equal nodes of a partition. usual: the partition is the site's default. longest: its time limit, as Slurm writes
    it."""

    partition: str
    usual: bool
    nodes: int
    cpus: int
    memory_mb: int
    gpus: int
    longest: str = ""

    def __str__(self) -> str:
        return (f"partition {self.partition}{'*' * self.usual}: {counted(self.nodes, 'node')} with "
                f"{counted(self.cpus, 'core')}, {self.memory_mb:,} MB, {counted(self.gpus, 'GPU')}; time limit "
                f"{self.longest}")


@dataclass(frozen=True)
class _Answer:
    """A program's answer; `status` is None if it did not end in time or could not be started."""

    status: int | None
    out: str
    error: str

    @property
    def unknown_job(self) -> bool:
        return "invalid job id" in self.error.lower()

    @property
    def problem(self) -> str | None:
        """Why it failed: what it said, without its name. None: it did not fail."""
        return None if self.status == 0 else plain(self.error or self.out) or f"exit status {self.status}"


OWN = ("SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_JWT")
"""Variables about where Slurm is, not about a job."""


def of_another_job(environment: Environment) -> list[str]:
    """Variables that a job or an allocation has set, those that override options in sbatch's script (SBATCH_*), and
    those that change the output of Slurm's programs. Neither submitted jobs nor these programs must inherit them."""
    return sorted(name for name in environment if name not in OWN and name.startswith(
        ("SLURM_", "SLURMD_", "SBATCH_", "SRUN_", "SALLOC_", "SUBMITIT_", "PMI", "SQUEUE_", "SACCT_", "SINFO_",
         "SCONTROL_")))


class Scheduler:
    """Slurm's programs, found on PATH.

    Args:
        environment: of the programs.
        timeout_s: how long each may take. Without a controller squeue itself would try for 18 s.
    """

    def __init__(self, environment: Environment = os.environ, timeout_s: float = 10) -> None:
        foreign = of_another_job(environment)
        self._environment = {name: value for name, value in environment.items() if name not in foreign}
        self._timeout_s = timeout_s

    def jobs(self, ids: Iterable[str]) -> dict[str, JobInfo] | None:
        """The jobs by id; None if Slurm does not answer.

        `12` may be a whole array: its state then sums up the elements that squeue knows. If all elements matter, also
        those that ended long ago, ask for each (`12_3`).
        """
        wanted = dict.fromkeys(ids)
        if not wanted:
            return {}
        known = self._queue("--array", "--states", "all", "--jobs", ",".join(sorted({*map(_array, wanted)})))
        if known is None:
            return None
        if gone := sorted({_array(id) for id in wanted if _summary(id, known).state == UNKNOWN}):
            known = {**self._accounting(gone), **known}
        return {id: _summary(id, known) for id in wanted}

    def mine(self) -> list[JobInfo] | None:
        """This user's jobs in the queue, an array once; None if Slurm does not answer."""
        known = self._queue("--user", str(os.getuid()))
        return None if known is None else [*{_array(id): replace(job, id=_array(id)) for id, job in known.items()
                                             }.values()]

    def cancel(self, id: str) -> str | None:
        """Cancel a job; None, or why that failed. A job that has already ended is no failure."""
        answer = self._ask("scancel", id)
        return None if answer.unknown_job or "already complet" in answer.error else answer.problem

    def node_kinds(self) -> list[NodeKind]:
        """The kinds of nodes in each partition that this user's groups may use; [] if Slurm does not answer."""
        rows = self._rows("sinfo", "--noheader", "--exact", "--format", "%P|%D|%c|%m|%G|%l")
        return [NodeKind(name.rstrip("*"), name.endswith("*"), int(nodes), int(cpus), int(memory),
                         sum(int(count or 1) for count in GPUS.findall(gpus)), longest)
                for name, nodes, cpus, memory, gpus, longest in rows if f"{nodes}{cpus}{memory}".isdecimal()]

    def site_settings(self) -> dict[str, str]:
        """Settings of slurm.conf by name; {} if Slurm does not answer."""
        return dict(re.findall(r"(?m)^(\S+) *= (.*?) *$", self._ask("scontrol", "show", "config").out))

    def node_states(self, nodes: Iterable[str]) -> dict[str, str]:
        """State of each node (`idle`, `mixed`, `down*`), without nodes that Slurm does not know."""
        return dict(self._rows("sinfo", "--noheader", "--Node", "--nodes", ",".join(nodes), "--format", "%N|%T"))

    def node_address(self, name: str) -> str:
        """The address of a node: its name if that resolves here, or if Slurm does not answer, else the one it has."""
        with suppress(OSError):
            socket.getaddrinfo(name, None)
            return name
        known = re.search(r"NodeAddr=(\S+)", self._ask("scontrol", "--oneliner", "show", "node", name).out)
        return known[1] if known else name

    def _queue(self, *which: str) -> dict[str, JobInfo] | None:
        columns = ",".join(f"{name}:{width}" for name, width in COLUMNS)
        answer = self._ask("squeue", "--noheader", "--all", *which, "--Format", columns)
        if answer.unknown_job and "--jobs" in which:
            return self._queue("--array", "--states", "all")  # one bad id must not hide the others
        if answer.status != 0:
            return None
        known = {}
        for line in answer.out.splitlines():
            id, state, reason, nodes, used, restarts, name, comment, left = (
                line[end - width:end].strip() for (_, width), end in zip(COLUMNS, ENDS, strict=True))
            if id[:1].isdigit() and state:  # not `CLUSTER: name`
                known[id] = JobInfo(id, state, _word(reason), nodes, seconds(used),
                                    int(restarts) if restarts.isdigit() else 0, name, _word(comment),
                                    seconds(left, inf))
        return known

    def _accounting(self, ids: list[str]) -> dict[str, JobInfo]:
        """Jobs in the accounting database; {} without one."""
        rows = self._rows("sacct", "--noheader", "--parsable2", "--allocations", "--jobs", ",".join(ids),
                          "--format", "JobID,State,Reason,NodeList")
        # A job that squeue does not know neither waits nor runs, even if the database has missed its end.
        return {id: JobInfo(id, state, reason, _word(nodes)) for id, words, reason, nodes in rows
                if (state := words.partition(" ")[0]) in ENDED}

    def _rows(self, *command: str) -> list[list[str]]:
        """The rows of an answer with columns separated by bars; [] if Slurm does not answer."""
        answer = self._ask(*command)
        columns = len(re.split("[|,]", command[-1]))
        rows = [line.strip().split("|") for line in answer.out.splitlines() if answer.status == 0]
        return [row for row in rows if len(row) == columns]

    def _ask(self, *command: str) -> _Answer:
        try:
            return _Answer(*answer_of(command, self._environment, self._timeout_s))
        except OSError as error:
            return _Answer(None, "", f"{command[0]} cannot be started here: {error.strerror}")
        except subprocess.TimeoutExpired:
            return _Answer(None, "", f"{command[0]} did not answer within {self._timeout_s:g} s")


class NoScheduler(Scheduler):
    """The scheduler of a machine without Slurm: it never answers."""

    def _ask(self, *command: str) -> _Answer:
        return _Answer(None, "", "there is no Slurm here")


def seconds(text: str, otherwise: float = 0) -> float:
    """A time of Slurm's in seconds; `otherwise` for a word such as `infinite`."""
    try:
        return seconds_of(text)
    except ValueError:
        return otherwise


def literal(path: Path) -> str:
    """A path in an option of Slurm's that names a log, where % begins a replacement."""
    return str(path).replace("%", "%%")


def plain(message: str) -> str:
    """What a program of Slurm said, in one line and without the program's name."""
    return "; ".join(re.split(r"\n+", re.sub(r"(?m)^\w+: (error|fatal): ", "", message).strip()))


def _summary(id: str, known: Mapping[str, JobInfo]) -> JobInfo:
    """The job; or the array, with the state of its elements of the lowest rank."""
    elements = [known[id]] if id in known else [job for job in known.values() if _array(job.id) == id]
    first = min(elements, key=lambda job: RANKS.get(job.state, 3), default=JobInfo(id))
    nodes = sorted({job.nodes for job in elements if job.nodes and job.state == first.state})
    return replace(first, id=id, nodes=",".join(nodes), elapsed_s=max((job.elapsed_s for job in elements), default=0))


def _array(id: str) -> str:
    return id.partition("_")[0]


def _word(text: str) -> str:
    return "" if text in ("None", "None assigned", "(null)") else text
