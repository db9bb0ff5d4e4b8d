"""How far a stage's attempt came, in `STATE.json`: what the launcher believes instead of exit codes.

Slurm's exit codes carry no meaning (a killed rank, a cancelled job and a preempted one look alike), so every stage says
in its folder that it runs, and at its end how it ended. Who finds `running` there after the process is gone knows that
it crashed. The manifest alone decides whether a stage is done; this record is for going on, and for people.
"""

from __future__ import annotations

import os
import platform
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Literal, TypedDict

from drover.pipeline.core.errors import UserError
from drover.pipeline.core.files import append_line, read_lines, read_record, write_note, write_sealed

STATE = "STATE.json"
STOP = Path("launch") / "stop"
"""In a run folder: while this file is there, training saves and leaves. Its text is the reason."""
CANCEL = Path("launch") / "cancel"
"""In a run folder: asks the launcher of a run on hosts without Slurm to end."""
LAUNCHER = "launcher"
"""The lock that such a launcher holds."""
ATTEMPTS = Path("launch") / "attempts"
"""In a run folder: what the launcher did, a file per job, one JSON object a line (`log_attempt`). Not one file for all:
on network file systems lines that several nodes append at once overwrite each other."""
EVALUATIONS = Path("evaluations")
"""In a run folder: a run folder of its own for each checkpoint that is evaluated beside training."""
PROGRESS = "PROGRESS.json"
"""Beside STATE.json: how far the stage's work is (`Progress`). Only people read it."""
PROGRESS_EVERY_S = 5.0
Status = Literal["running", "done", "preempted", "failed"]


def is_time(text: str) -> None:
    """ValueError unless this is a time as ISO 8601 has it, of our age."""
    if not 1970 < datetime.fromisoformat(text).year < 3000:
        raise ValueError(f"{text[:40]!r} is no time")


Time = Annotated[str, is_time]


@dataclass(frozen=True)
class StageState:
    """The last word of a stage's attempt.

    Attributes:
        step: optimizer steps done and saved, for train.
        reason: why it ended, in words.
        units: of the phase that was stopped, how many are done, for a stage that is done in units.
        idle: so many starts in a row were stopped before they finished a unit.
        again: whether going on at once makes sense: after a time limit yes, after a user's request to stop no.
        job, restart: Slurm's job id and restart count; empty and 0 outside of Slurm.
        attempt: which start within the job.
    """

    status: Status
    step: int | None = None
    reason: str = ""
    again: bool = False
    units: int | None = None
    idle: int = 0
    job: str = ""
    restart: int = 0
    attempt: int = 0
    host: str = ""
    at: str = ""


def write_state(folder: Path, status: Status, *, step: int | None = None, reason: str = "",
                again: bool = False, units: int | None = None, idle: int = 0, file: str = STATE) -> None:
    """Record how the stage in `folder` stands; for one process of the stage, or for one share of it in a `file` of its
    own. OSError if it cannot be written."""
    write_sealed(folder / file, asdict(StageState(
        status, step, reason, again, units, idle, job=os.environ.get("SLURM_JOB_ID", ""),
        restart=int(os.environ.get("SLURM_RESTART_COUNT") or 0), attempt=int(os.environ.get("DROVER_ATTEMPT") or 0),
        host=platform.node(), at=now())))


def read_state(folder: Path, file: str = STATE) -> StageState | None:
    """The record in a stage's folder; None if there is none, or it is torn (as a full disk leaves it)."""
    try:
        return read_record(folder / file, StageState)
    except UserError:
        return None


def now() -> str:
    """The time in UTC, to the millisecond, as ISO 8601."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


@dataclass(frozen=True)
class Progress:
    """How far a stage's work is.

    Attributes:
        phase: whose units are counted, for a stage that works in phases.
        left_s: seconds to the end of what is counted.
        loss: of the last step, for train; in the file a text where it is no number, as JSON has none for NaN.
    """

    done: int
    total: int
    unit: str
    phase: str = ""
    left_s: float | None = None
    loss: float | None = None
    tokens_per_s: float | None = None
    goodput: float | None = None
    at: str = field(default_factory=now)


class ProgressRecord:
    """Keeps PROGRESS.json of the stage in `folder` (None: of none) up to date, every few seconds at most.

    A record that cannot be written is left out: work never waits for it to reach the disk, nor ends because of it.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder, self._next = folder, 0.0
        self._latest: Progress | None = None

    def note(self, progress: Progress) -> None:
        """Take the place of what was noted before."""
        self._latest = progress
        if time.monotonic() >= self._next:
            self.flush()

    def flush(self) -> None:
        """Write what was noted last."""
        if self._folder is None or self._latest is None:
            return
        with suppress(OSError):
            write_note(self._folder / PROGRESS, asdict(self._latest))
        self._latest, self._next = None, time.monotonic() + PROGRESS_EVERY_S


def log_attempt(run_folder: Path, event: str, *, job: str, **details: Any) -> None:
    """Append what the launcher did: `job` (an allocation began), `preflight`, `attempt` (ranks started), `ended`."""
    append_line(run_folder / ATTEMPTS / f"{job}.jsonl", {"event": event, "at": now(), "job": job, **details})


def read_attempts(run_folder: Path) -> list[dict[str, Any]]:
    """All that `log_attempt` wrote, in order; [] for a run that no launcher logged."""
    found = [event for path in sorted((run_folder / ATTEMPTS).glob("*.jsonl"))
             for event in read_lines(path, Attempt, appended=True)]
    return sorted(found, key=lambda event: str(event["at"]))


class _Event(TypedDict):
    event: str
    at: Time
    job: str
    stage: str
    start: int


class Attempt(_Event, total=False):
    """What of a line of the launcher's others compute with."""

    chain: str
    status: str
    next: str
    reason: str
    seconds: float
    restart: int
    nodes: list[str]
