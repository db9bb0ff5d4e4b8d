"""A step of ranks through srun, and what is known of the end of ranks from what srun said."""

from __future__ import annotations

import json
import re
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from drover.launch.processes import BROKEN_S, KILL_S, Processes
from drover.launch.slurm import trust
from drover.launch.slurm.jobspec import JobSpec
from drover.launch.slurm.start_logs import last_lines, rank_log

WAIT_S = 30
"""Seconds that the other ranks get once one has ended well."""
MAKE_S = 30.0
"""Seconds after which a srun that has started no task is ended, to be called again: a controller that has just come
back may let it wait for room that is there."""
# One line about tasks that ended badly: `n3`, `2` or `0-1`, `Killed` or `Exited with exit code 7`.
_ENDED = re.compile(r"^(?:srun: error: )?(?P<node>\S+): tasks? (?P<tasks>[0-9,-]+): "
                    r"(?P<how>Exited with exit code (?P<code>\d+)|.+)$", re.MULTILINE)
_NODE = re.compile(r"^srun: error: (?:Node failure on (\S+)|Task launch for .* failed on node (\S+):)", re.MULTILINE)
_VANISHED = re.compile(r"missing step on node (?P<index>\d+)")
_NO_STEP = re.compile(r"^srun: error: (.*(?:Unable to (?:create step|resolve|confirm allocation)"
                      r"|Application launch failed|Job/step already completing).*)$", re.MULTILINE | re.IGNORECASE)


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
    def first(self) -> re.Match[str] | None:
        """Of the tasks that ended badly, those that srun named first, and that were not ended for others' sake."""
        ends = list(_ENDED.finditer(self.said))
        own = [end for end in ends if end["how"] != "Terminated" and end["code"] != "143"]
        return next(iter(own + ends), None)

    @property
    def rank(self) -> int:
        """The lowest of the first ranks that ended badly."""
        return int(re.split("[,-]", self.first["tasks"])[0]) if self.first else 0

    @property
    def started(self) -> bool:
        """Whether there was a step at all."""
        return not self.given_up and _NO_STEP.search(self.said) is None

    @property
    def exit_code(self) -> int | None:
        """Of the first to end, if it chose to, so that its last words say why."""
        if self.first:
            return int(self.first["code"]) if self.first["code"] and not _VANISHED.search(self.said) else None
        return self.status if 0 < self.status < 128 else None

    @property
    def lost(self) -> list[str]:
        """Nodes that Slurm says failed."""
        return list(dict.fromkeys(found[1] or found[2] for found in _NODE.finditer(self.said)))

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
        if first := self.first:
            ranks = "rank" if first["tasks"].isdigit() else "ranks"
            return f"{ranks} {first['tasks']} on {first['node']}: {first['how'][0].lower()}{first['how'][1:]}"
        if found := _NO_STEP.search(self.said):
            return found[1]
        return f"killed by {signal.Signals(self.status - 128).name}" if 128 < self.status < 128 + 65 else ""


def srun_command(spec: JobSpec, folder: Path, stage: str, command: Sequence[str]) -> list[str]:
    """srun's command line for one task per rank, or one for a stage without ranks; their output in `folder`, in a file
    for each node.

    `--label`: slurmstepd then writes each file, line by line. Ranks that shared one would cut one another's lines.
    `--overlap`: of a step whose slurmstepd died Slurm never hears the end, and would let the next one wait for ever.
    `--export`: the site may have set SBATCH_EXPORT or SLURM_EXPORT_ENV to NONE.
    """
    place = str(folder).replace("%", "%%")
    # Each node gets its copy of the code before anything of it is imported there. The program goes along as text, which
    # this process has from a compared copy: the run folder's file may have been exchanged since.
    copying = [sys.executable, "-I", "-c", Path(trust.__file__).read_text(), "node",
               json.dumps({name: vars(spec)[name] for name in trust.CODE})]
    return ["srun", "--kill-on-bad-exit=1", f"--wait={WAIT_S}", f"--nodes={spec.nodes}", f"--ntasks={spec.ranks or 1}",
            f"--ntasks-per-node={spec.tasks_per_node}", f"--cpus-per-task={spec.cpus_per_task}", "--export=ALL",
            "--distribution=block", "--overlap", "--label", f"--output={place}/node%n.log",
            *(copying if spec.code_sha256 and not spec.wrap else []),
            sys.executable, "-m", "drover.launch.slurm.job.rank",
            stage, *command]


def run_step(command: Sequence[str], environment: Mapping[str, str], folder: Path, each: Callable[[], bool],
             say: Callable[[str], None]) -> StepEnd:
    """Run srun to its end. What it says is said; `each` is called all along, and ends the step by answering False."""
    log = folder / "srun.err"
    log.write_bytes(b"")
    with open(log, errors="replace") as reader:
        began, said, broken, made, given_up = time.monotonic(), "", 0.0, False, False

        def hear() -> None:
            nonlocal said
            new = reader.read()
            said += new
            for line in filter(str.strip, new.splitlines()):
                say(line)

        def goes_on() -> bool:
            nonlocal broken, made, given_up
            hear()
            broken = broken or (time.monotonic() if _ENDED.search(said) else 0.0)
            made = made or any(folder.glob("node*.log"))
            given_up = given_up or (not made and time.monotonic() - began > MAKE_S)
            return each() and not given_up and not (broken and time.monotonic() - broken > BROKEN_S)

        srun = Processes(command, environment, log=log)  # which answers SIGTERM by killing its tasks at once
        status = srun.run(goes_on)
        hear()
    return StepEnd(status, said, given_up, srun.killed)


def last_words(folder: Path, end: StepEnd, ranks_per_node: int, count: int) -> list[str]:
    """The last lines of the first rank that failed."""
    path = rank_log(folder, end.rank, ranks_per_node)
    return [f"rank {end.rank}: {line}" for line in last_lines(path, end.rank, count)]
