"""The facts of a run: what its training and its launcher recorded.

Status, logs, why, the report, goodput, the audit and trace all read a run here.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from drover.pipeline.contract.state import read_attempts
from drover.pipeline.core.files import Record
from drover.pipeline.records.checkpoints import CHECKPOINTS, TrainingProgress, named_after_steps, read_marker
from drover.pipeline.records.metrics import TrainingRecords
from drover.pipeline.records.rollbacks import Rollback, read_rollbacks


@dataclass(frozen=True)
class Start:
    """A start of a stage, as the launcher recorded it.

    job, restart, number: which start of which job. chain: the submission, or the command on this machine.
    status, reason: how it ended; "" while it runs, or if no launcher saw its end. next: what the launcher did then.
    ended: when.
    """

    stage: str
    job: str
    restart: int
    number: int
    chain: str
    at: str
    nodes: tuple[str, ...]
    ranks: int
    status: str
    reason: str
    next: str
    ended: str

    @property
    def ranks_per_node(self) -> int:
        """How many ranks each of its nodes has."""
        return max(1, self.ranks // len(self.nodes))

    def logs(self, run_folder: Path) -> Path:
        """The folder with the output of its ranks."""
        return run_folder / "logs" / self.stage / f"{self.job}.{self.number}"


class RunFacts(TrainingRecords):
    """The facts of the run in a folder. Each file is read once, when it is first asked for; without it, the fact is
    empty. UserError if it is damaged."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder / "train")
        self.folder = folder

    @cached_property
    def attempts(self) -> list[Record]:
        """What the launcher did, in order."""
        return read_attempts(self.folder)

    @property
    def starts(self) -> list[Start]:
        """The starts of all stages, in order."""
        ends = {_start_of(event): event for event in self.attempts if event["event"] == "ended"}
        starts = []
        for event in self.attempts:
            if event["event"] == "attempt" and event.get("nodes"):
                end = ends.get(_start_of(event), {})
                starts.append(Start(
                    event["stage"], event["job"], event.get("restart", 0), event["start"], event.get("chain", ""),
                    event["at"], tuple(event["nodes"]), event.get("ranks", 1), end.get("status", ""),
                    end.get("reason", ""), end.get("next", ""), end.get("at", "")))
        return starts

    @cached_property
    def rollbacks(self) -> list[Rollback]:
        """The rollbacks of training, the oldest first."""
        return read_rollbacks(self.train)

    @property
    def checkpoints(self) -> dict[str, TrainingProgress]:
        """The progress in each checkpoint, by the checkpoint's name. UserError also for one that is not complete."""
        return {path.name: read_marker(path).progress for path in named_after_steps(self.train / CHECKPOINTS)}


def _start_of(event: Record) -> tuple[str, str, int, int]:
    """The start that an event belongs to."""
    return event["stage"], event["job"], event.get("restart", 0), event["start"]
