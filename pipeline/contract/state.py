"""The status of a stage's attempt, in `STATE.json`. The launcher relies on it, not on exit codes.

Slurm's exit codes do not say what happened: a killed rank, a cancelled job and a preempted one can have the same. So
every stage writes in its folder that it runs, and finally how it ended. If the file says `running` and there is no
process, the stage has crashed. The manifest replaces the file when the stage is done. This record is for the decision
whether to continue, and for people.

What a process knows of the launcher's job that it belongs to is here, too. The launcher passes it as `--job`. A stage
that is started by hand or by torchrun has none.
"""

from __future__ import annotations

import json
import os
import platform
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Literal, TypedDict

from drover.pipeline.contract.manifest import Manifest, ThisStart, read_manifest
from drover.pipeline.core.errors import UserError
from drover.pipeline.core.files import (
    Count,
    append_line,
    read_lines,
    read_record,
    remove,
    write_json,
    write_sealed,
)

RANK_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""Variables of torch.distributed, which the launcher sets for each rank."""


LOCAL = "local-"
"""How the chain of a command on this machine begins."""


@dataclass(frozen=True)
class StageJob:
    """A start of a stage by the launcher.

    chain: id of the submission, or of the command on this machine; "" without a launcher.
    start: number of the start within the job.
    ranks: how many ranks were to be started; 0 for a stage without ranks.
    """

    chain: str = ""
    start: int = 0
    ranks: int = 0

    def __str__(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def parse(cls, text: str) -> StageJob:
        """The job that `str` gave."""
        return cls(**json.loads(text))


class _Process:
    job = StageJob()


def this_job() -> StageJob:
    """The job of this process."""
    return _Process.job


def set_this_job(job: StageJob) -> None:
    """Called once, when the command line has been read."""
    _Process.job = job


STATE = "STATE.json"
STOP = Path("launch") / "stop"
"""In a run folder: while this file exists, training saves and exits. Its text is the reason."""
ATTEMPTS = Path("launch") / "attempts"
"""In a run folder: the launcher's actions, a file per job, one JSON object a line (`log_attempt`). There is not one
file for all jobs, since on network file systems, lines that several nodes append at once overwrite each other."""
PROGRESS = "PROGRESS.json"
"""Next to STATE.json: the progress of the stage's work (`Progress`). Only people read it."""
PROGRESS_EVERY_S = 5.0
Status = Literal["running", "done", "preempted", "failed"]


def is_time(text: str) -> None:
    """ValueError unless this is a time in ISO 8601, between 1970 and 3000."""
    if not 1970 < datetime.fromisoformat(text).year < 3000:
        raise ValueError(f"{text[:40]!r} is no time")


Time = Annotated[str, is_time]


@dataclass(frozen=True)
class StageState:
    """The status of a stage's attempt.

    Attributes:
        step: optimizer steps done and saved, for train.
        reason: why it ended, in words.
        units: how many tasks of the interrupted pass are done, for a stage with tasks.
        idle: how many starts in a row were stopped before they finished a task; for train, a second step.
        again: whether to continue at once: yes after a time limit, no after a user's request to stop.
        job, restart: Slurm's job id and restart count; empty and 0 outside of Slurm.
        attempt: number of the start within the job.
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


def write_state(folder: Path, status: Status, file: str = STATE, **facts: Any) -> None:
    """Write the status of the stage in `folder`, or of one of the processes that share it, in a `file` of its own. Only
    one process may write a file. facts: step, reason, again, units and idle of the `StageState`. OSError if it cannot
    be written."""
    write_sealed(folder / file, asdict(replace(StageState(status, **this_start(), at=now()), **facts)))


def this_start() -> ThisStart:
    """What identifies the start that this process belongs to: `job`, `restart`, `attempt` and `host`."""
    return {"job": os.environ.get("SLURM_JOB_ID", ""), "restart": int(os.environ.get("SLURM_RESTART_COUNT") or 0),
            "attempt": this_job().start, "host": platform.node()}


def read_state(folder: Path, file: str = STATE) -> StageState | None:
    """The record in a stage's folder; for a finished stage, from its manifest. None if there is neither, or if one is
    truncated (after a full disk)."""
    with suppress(UserError):
        if (state := read_record(folder / file, StageState)) is not None:
            return state
        if file == STATE and (manifest := read_manifest(folder)) is not None:
            made = manifest.execution
            return StageState("done", step=manifest.counts.get("steps"), at=manifest.finished, job=made.get("job", ""),
                              restart=made.get("restart", 0), attempt=made.get("attempt", 0), host=made.get("host", ""))
    return None


def left_files(folder: Path, manifest: Manifest) -> list[Path]:
    """What the work on a finished stage left in its folder: its scratch files, and the status, also one that a killed
    process was writing."""
    status = folder / STATE
    return [*manifest.left_scratch(folder), *([status] if status.exists() else []), *folder.glob(f"{STATE}.*.tmp")]


def clear(folder: Path, manifest: Manifest) -> list[str]:
    """Remove the `left_files`. Returns the names of the scratch files among them; OSError if that fails."""
    left = left_files(folder, manifest)
    for path in left:
        remove(path)
    return [path.name for path in left if not path.name.startswith(STATE)]


def now() -> str:
    """The time in UTC, to the millisecond, as ISO 8601."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


@dataclass(frozen=True)
class Progress:
    """Progress of a stage's work.

    Attributes:
        phase: the pass whose tasks are counted, for a data stage.
        left_s: seconds until all are done.
        loss: of the last step, for train. The file has NaN as a text, since JSON has no such number.
        restarts: how often train was started before; None for other stages.
    """

    done: int
    total: int
    unit: str
    phase: str = ""
    left_s: float | None = None
    loss: float | None = None
    tokens_per_s: float | None = None
    goodput: float | None = None
    restarts: int | None = None
    at: str = field(default_factory=now)


class ProgressRecord:
    """Keeps PROGRESS.json of the stage in `folder` up to date, every few seconds at most.

    The work never waits until the record is on the disk, and continues if it cannot be written.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._next = 0.0
        self._latest: Progress | None = None

    @property
    def due(self) -> bool:
        """Whether the last write was long enough ago."""
        return time.monotonic() >= self._next

    def note(self, progress: Progress) -> None:
        """Replace the record, and write it if that is `due`."""
        self._latest = progress
        if self.due:
            self.flush()

    def flush(self) -> None:
        """Write the latest record."""
        if self._latest is None:
            return
        with suppress(OSError):
            write_json(self._folder / PROGRESS, asdict(self._latest), durable=False)
        self._latest, self._next = None, time.monotonic() + PROGRESS_EVERY_S


KILLED = "killed"
"""Event of a runner's death: the last one of its restart."""


def log_attempt(run_folder: Path, event: str, *, job: str, **details: Any) -> None:
    """Append an event of the launcher: `job` (allocation started), `preflight`, `attempt` (ranks started), `ended`,
    KILLED."""
    append_line(run_folder / ATTEMPTS / f"{job}.jsonl", {"event": event, "at": now(), "job": job, **details})


def read_attempts(run_folder: Path) -> list[Attempt]:
    """All events of `log_attempt`, in order; [] for a run without any."""
    result = [event for path in sorted((run_folder / ATTEMPTS).glob("*.jsonl"))
             for event in read_lines(path, Attempt, appended=True)]
    return sorted(result, key=lambda event: str(event["at"]))


class _Event(TypedDict):
    event: str
    at: Time
    job: str
    stage: str
    start: int


class Attempt(_Event, total=False):
    """The fields of a launcher's event that other code uses."""

    chain: str
    status: str
    next: str
    reason: str
    seconds: float
    restart: int
    nodes: list[str]
    ranks: Count
