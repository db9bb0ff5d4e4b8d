"""Programs as shell scripts on PATH, above all Slurm's: they say what Slurm 22.05 said, hang, fail, or are missing."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path

from drover.launch.slurm.scheduler import Scheduler

WIDTHS = (40, 20, 200, 400, 20, 10, 200, 200, 20)
"""Of the columns JobArrayID, State, Reason, NodeList, TimeUsed, RestartCnt, Name, Comment as they were recorded, and
TimeLeft."""
NO_CONTROLLER = "slurm_load_jobs error: Unable to contact slurm controller (connect failure)"
NO_JOB = "slurm_load_jobs error: Invalid job id specified"
NO_DATABASE = """\
sacct: error: slurm_persist_conn_open_without_init: failed to open persistent connection to host:vm:26819: Connection \
refused
sacct: error: Sending PersistInit msg: Connection refused
sacct: error: Problem talking to the database: Connection refused"""


@dataclass
class Programs:
    """A folder of programs, and what they were called with."""

    folder: Path

    def say(self, program: str, out: str = "", error: str = "", status: int = 0) -> None:
        """Let a program answer this."""
        self.do(program, f"cat <<'END_OF_OUT'\n{out}\nEND_OF_OUT\n" * bool(out)
                + f"cat >&2 <<'END_OF_ERROR'\n{error}\nEND_OF_ERROR\n" * bool(error) + f"exit {status}\n")

    def do(self, program: str, script: str) -> None:
        """Let a program run a shell script."""
        self.folder.mkdir(exist_ok=True)
        path = self.folder / program
        path.write_text(f"#!/bin/sh\nPATH=/usr/bin:/bin\necho \"{program} $*\" >> '{self.folder}/calls'\n{script}")
        path.chmod(0o755)

    def queue(self, *jobs: str) -> None:
        """Let squeue list jobs: words for id, state, and perhaps reason, nodes, time, restarts, name."""
        self.say("squeue", "\n".join(queue_line(*shlex.split(job)) for job in jobs))

    def calls(self, program: str = "") -> list[str]:
        """The command lines so far, of one program or all."""
        path = self.folder / "calls"
        lines = path.read_text().splitlines() if path.exists() else []
        return [line for line in lines if line.startswith(program)]

    def scheduler(self, timeout_s: float = 10) -> Scheduler:
        """One that sees these programs only."""
        return Scheduler({"PATH": str(self.folder), "SQUEUE_FORMAT": "%i"}, timeout_s)


def queue_line(id: str, state: str, reason: str = "None", nodes: str = "", used: str = "0:00", restarts: str = "0",
               name: str = "demo-train", comment: str = "(null)") -> str:
    """A line of `squeue --Format`, padded as squeue does."""
    return "".join(value.ljust(width) for value, width in
                   zip((id, state, reason, nodes, used, restarts, name, comment, "INVALID"), WIDTHS, strict=True))
