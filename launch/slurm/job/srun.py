"""The processes of a start: a step of ranks through srun, or one child; and what srun said of their end."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from launch.processes import end_with_parent, kill_tree
from launch.slurm.job.decisions import REFUSED
from launch.slurm.jobspec import JobSpec
from pipeline.records.rank_files import FLAT, node_folders, rank_files

POLL_S = 0.25
WAIT_S = 30
"""Seconds that the other ranks get once one has ended well."""
BROKEN_S = 12.0
"""Seconds that the others get once one has ended badly; srun itself would wait longer for one that it cannot reach."""
MAKE_S = 30.0
"""Seconds after which a srun that has started no task is ended, to be called again: a controller that has just come
back may let it wait for room that is there."""
KILL_S = 40.0
"""Seconds until a step that is to be killed is given up."""
_ENDED = re.compile(r"^(?:srun: error: )?(?P<node>\S+): tasks? (?P<tasks>[0-9,-]+): (?P<how>.+)$", re.MULTILINE)
_NODE = re.compile(r"^srun: error: (?:Node failure on (?P<node>\S+)|Task launch for .* failed on node (?P<other>\S+):)",
                   re.MULTILINE)
_VANISHED = re.compile(r"missing step on node (?P<index>\d+)")
_NO_STEP = re.compile(r"^srun: error: .*(?:Unable to create step|Application launch failed|Unable to confirm allocation"
                      r"|Job/step already completing|Unable to resolve).*$", re.MULTILINE | re.IGNORECASE)


@dataclass(frozen=True)
class TaskEnd:
    """One line of srun about tasks that ended badly: `n3`, `2` or `0-1`, `Killed` or `Exited with exit code 7`."""

    node: str
    tasks: str
    how: str

    @property
    def first_task(self) -> int:
        """The lowest rank among the tasks."""
        return int(re.split("[,-]", self.tasks)[0])

    @property
    def follows(self) -> bool:
        """Whether that is how tasks end that are ended because of another one."""
        return self.how in ("Terminated", "Exited with exit code 143")

    def __str__(self) -> str:
        many = not self.tasks.isdigit()
        how = self.how[0].lower() + self.how[1:]
        return f"rank{'s' if many else ''} {self.tasks} on {self.node}: {how}"


@dataclass(frozen=True)
class StepEnd:
    """How a step ended.

    status: of srun or of the child (128 + n for signal n), nothing to rely on. said: srun's stderr, or a line for each
        rank that ended badly, as srun would write it.
    given_up: srun had started no task for so long that it was ended.
    abandoned: srun itself did not end and was killed: Slurm may still run its tasks.
    """

    status: int
    said: str = ""
    given_up: bool = False
    abandoned: bool = False

    @property
    def first(self) -> TaskEnd | None:
        """Of the tasks that ended badly, those that srun named first, and that were not ended for others' sake."""
        ends = [TaskEnd(**found.groupdict()) for found in _ENDED.finditer(self.said)]
        return next((end for end in ends if not end.follows), ends[0] if ends else None)

    @property
    def started(self) -> bool:
        """Whether there was a step at all."""
        return not self.given_up and _NO_STEP.search(self.said) is None

    @property
    def refused(self) -> bool:
        """Whether the first to end gave the exit status of a refusal."""
        return self.first.how == f"Exited with exit code {REFUSED}" if self.first else self.status == REFUSED

    @property
    def lost(self) -> list[str]:
        """Nodes that Slurm says failed."""
        return list(dict.fromkeys(found["node"] or found["other"] for found in _NODE.finditer(self.said)))

    @property
    def exited(self) -> bool:
        """Whether the first to end chose to, so that its last words say why."""
        if _VANISHED.search(self.said):
            return False
        return self.first.how.startswith("Exited") if self.first else 0 < self.status < 128

    @property
    def cause(self) -> str:
        """What is known, in a few words; empty if nothing."""
        if self.lost:
            return f"lost {', '.join(self.lost)}"
        if self.given_up:
            return f"srun started no task in {MAKE_S:.0f} s"
        if self.abandoned:
            return f"srun did not end within {KILL_S:.0f} s of being told to, and its tasks may still run"
        if found := _VANISHED.search(self.said):  # the others' complaints came first
            return f"Slurm lost the tasks of the step's node number {found['index']}, from 0 (slurmstepd died)"
        if self.first:
            return str(self.first)
        if found := _NO_STEP.search(self.said):
            return found.group().removeprefix("srun: error: ")
        return f"killed by {signal.Signals(self.status - 128).name}" if 128 < self.status < 128 + 65 else ""


def srun_command(spec: JobSpec, folder: Path, command: Sequence[str], *, stage: str = "") -> list[str]:
    """srun's command line for one task per rank; each rank's output in a file of its own in `folder`, of many ranks in
    a folder for each node, which is made here: Slurm makes none.

    `--overlap`: of a step whose slurmstepd died Slurm never hears the end, and would let the next one wait for ever.
    `--export`: the site may have set SBATCH_EXPORT or SLURM_EXPORT_ENV to NONE.
    """
    for made in node_folders(folder, spec.ranks, spec.nodes):
        made.mkdir(parents=True, exist_ok=True)
    place = str(folder).replace("%", "%%") + ("/node%n" if spec.ranks > FLAT else "")
    return ["srun", "--kill-on-bad-exit=1", f"--wait={WAIT_S}", f"--nodes={spec.nodes}", f"--ntasks={spec.ranks}",
            f"--ntasks-per-node={spec.tasks_per_node}", f"--cpus-per-task={spec.cpus_per_task}", "--export=ALL",
            "--distribution=block", "--overlap", "--unbuffered",
            f"--output={place}/rank%t.out", f"--error={place}/rank%t.err",
            sys.executable, "-m", "launch.slurm.job.rank", *(["--stage", stage] if stage else []), "--", *command]


def run_step(command: Sequence[str], environment: Mapping[str, str], folder: Path, each: Callable[[], bool],
             say: Callable[[str], None], name: str = "srun.err") -> StepEnd:
    """Run srun to its end. What it says is said; `each` is called all along, and ends the step by answering False."""
    log = folder / name
    with open(log, "wb") as stderr, open(log, errors="replace") as reader:
        process = _start(command, environment, stdout=None, stderr=stderr)
        said, status, broken = _Lines(say), None, 0.0
        began, made, given_up, abandoned = time.monotonic(), False, False, False
        while status is None:
            status = process.poll()
            said.take(reader.read())
            broken = broken or (time.monotonic() if _ENDED.search(said.text) else 0.0)
            made = made or any(folder.glob("rank*.err")) or any(folder.glob("node*0/rank*.err"))  # of every tenth node
            given_up = given_up or (not made and time.monotonic() - began > MAKE_S)
            if status is None and (not each() or given_up or (broken and time.monotonic() - broken > BROKEN_S)):
                # srun answers SIGTERM by killing its tasks at once.
                status, abandoned = _end(process)
            if status is None:
                time.sleep(POLL_S)
        said.take(reader.read())
    return StepEnd(status if status >= 0 else 128 - status, said.text, given_up, abandoned)


def run_child(command: Sequence[str], environment: Mapping[str, str], folder: Path, each: Callable[[], bool],
              ends: Callable[[], bool], warns: Callable[[], bool] = lambda: False) -> StepEnd:
    """Run a stage without ranks to its end; once `ends` says so it is told to end, once `warns` does, that the time
    limit is near. Output as of a rank 0."""
    told = warned = False
    with open(folder / "rank0.out", "wb") as stdout, open(folder / "rank0.err", "wb") as stderr:
        process = _start(command, environment, stdout=stdout, stderr=stderr, blocked=(signal.SIGUSR1, signal.SIGUSR2))
        while (status := process.poll()) is None:
            if ends() and not told:
                told = True
                process.terminate()
            if not warned and warns():
                warned = True
                process.send_signal(signal.SIGUSR2)
            if not each():
                status, _ = _end(process)  # its processes are on this node, and have ended
                break
            time.sleep(POLL_S)
    return StepEnd(status if status >= 0 else 128 - status)


def last_lines(path: Path, count: int = 25, size: int = 20_000) -> list[str]:
    """The last lines of a file that may be large or absent."""
    try:
        with open(path, "rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - size))
            text = file.read().decode(errors="replace")
    except OSError:
        return []
    return [line.rpartition("\r")[2] for line in text.splitlines() if line.strip()][-count:]


def last_words(folder: Path, end: StepEnd, count: int) -> list[str]:
    """The last lines of the first failing rank's errors."""
    rank = end.first.first_task if end.first else 0
    return [f"rank {rank}: {line}" for path in rank_files(folder, f"rank{rank}.err")
            for line in last_lines(path, count)]


class _Lines:
    """Hands on whole lines as they come, and keeps all of the text."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self.say, self.text, self._rest = say, "", ""

    def take(self, text: str) -> None:
        self.text += text
        *lines, self._rest = (self._rest + text).split("\n")
        for line in lines:
            if line.strip():
                self.say(line)


def _start(command: Sequence[str], environment: Mapping[str, str], *, stdout: object,
           stderr: object, blocked: Sequence[signal.Signals] = ()) -> subprocess.Popen[bytes]:
    """blocked: signals that wait until the process says that it hears them."""
    return subprocess.Popen(command, env=dict(environment), stdin=subprocess.DEVNULL, stdout=stdout,  # type: ignore[call-overload]
                            stderr=stderr, preexec_fn=partial(_prepare, os.getpid(), blocked))


def _prepare(parent: int, blocked: Sequence[signal.Signals]) -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, blocked)
    end_with_parent(signal.SIGKILL, parent)


def _end(process: subprocess.Popen[bytes]) -> tuple[int, bool]:
    """End a process; its status, and whether it had to be killed with what is below it."""
    process.terminate()
    try:
        return process.wait(KILL_S), False
    except subprocess.TimeoutExpired:
        kill_tree(process.pid)
        return process.wait(), True
