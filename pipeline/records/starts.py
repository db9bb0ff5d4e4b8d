"""The starts of a run's stages, as the launcher recorded them: where each ran, and how it ended."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from drover.pipeline.contract.state import read_attempts


@dataclass(frozen=True)
class Start:
    """A start of a stage.

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
    status: str = ""
    reason: str = ""
    next: str = ""
    ended: str = ""

    @property
    def ranks_per_node(self) -> int:
        """How many ranks each of its nodes has."""
        return max(1, self.ranks // len(self.nodes))

    def logs(self, run_folder: Path) -> Path:
        """The folder with the output of its ranks."""
        return run_folder / "logs" / self.stage / f"{self.job}.{self.number}"


def read_starts(run_folder: Path) -> list[Start]:
    """All starts of a run, in their order."""
    events = read_attempts(run_folder)
    ends = {(event["stage"], event["job"], event.get("restart"), event["start"]): event
            for event in events if event["event"] == "ended"}
    starts = []
    for event in events:
        if event["event"] == "attempt" and event.get("nodes"):
            end = ends.get((event["stage"], event["job"], event.get("restart"), event["start"]), {})
            starts.append(Start(
                event["stage"], event["job"], event.get("restart", 0), event["start"], event.get("chain", ""),
                event["at"], tuple(event["nodes"]), event.get("ranks", 1), end.get("status", ""),
                str(end.get("reason") or ""), end.get("next", ""), end.get("at", "")))
    return starts
