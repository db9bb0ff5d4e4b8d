"""The facts of a run: what its training and its launcher recorded. Status, logs, why, the report, goodput, the audit
and trace all read a run here.

Training writes one JSON object per line: train/metrics.jsonl, and next to it samples.jsonl and events.jsonl. Rollbacks
are stored next to the checkpoints, not in them. A rollback returns to a checkpoint that has no record of it. So the
samples that it leaves out are first written to `train/rollbacks.json`. A restart from any checkpoint then leaves out
the same samples and makes the same batches.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, TypedDict

from drover.pipeline.contract.state import Attempt, Time, read_attempts
from drover.pipeline.core.files import Count, read_lines, read_record, write_sealed
from drover.pipeline.data.exclusion import Excluded, Range, format_ranges
from drover.pipeline.records.checkpoints import CHECKPOINTS, TrainingProgress, named_after_steps, read_marker

PLAN_CHANGED = "plan_changed"
"""The event of a start that continues under another plan or other accepted settings. Its `number` counts such starts.
Each line of metrics.jsonl has in `plan_changes` how many came before it. Numbers, not times, give the order: the clocks
of two nodes may differ, and a run restored from a copy may lack lines."""
DIVERGED = "Training stopped at step"
"""How the error begins with which the guards end a training that does not recover."""
OTHER_ORDER = "samples come in another order"
"""One of its changes."""
MOST_SAMPLES = 1 << 30
"""No step trains on more."""


def is_range(numbers: list[int]) -> None:
    """ValueError unless these are a first number and an end."""
    if len(numbers) != 2 or not 0 <= numbers[1] - numbers[0] <= MOST_SAMPLES:
        raise ValueError(f"{numbers[:5]} is no range")


def is_figure(value: Any) -> None:
    """ValueError unless this is a number, or a text for one that JSON cannot hold (NaN)."""
    try:
        float(value)
    except (TypeError, OverflowError) as error:
        raise ValueError(str(error)) from None


class _Line(TypedDict):
    step: Count


class Line(_Line, total=False):
    """The fields of a line of metrics.jsonl that other programs compute with."""

    samples: Annotated[list[Count], is_range]
    plan_changes: Count
    rollbacks: Count
    left_out: list[Annotated[list[Count], is_range]]
    loss: Annotated[Any, is_figure]
    grad_norm: Annotated[Any, is_figure]
    time: float
    step_s: float
    train_s: float
    look_s: float
    stall_s: float
    skipped: str
    tokens: Count
    validation_sample_bpb: dict[str, object]
    validation_sample_loss: dict[str, object]


class LoggedSample(TypedDict):
    """A line of samples.jsonl: the continuation of a prompt after a step."""

    step: Count
    prompt: str
    text: str


class _TrainingEvent(TypedDict):
    event: str


class Event(_TrainingEvent, total=False):
    """The fields of a line of events.jsonl that other programs compute with."""

    time: Time
    step: Count
    number: Count
    ranks: Count
    accepted: list[str]
    changes: list[str]
    startup_s: float
    train_s: float
    look_s: float
    stall_s: float
    lost_s: float
    reason: str


class TrainingRecords:
    """The records in the folder of the train stage. Each file is read once, when it is first asked for; a missing one
    has no lines. UserError if it is damaged."""

    def __init__(self, folder: Path, metrics: str = "metrics.jsonl") -> None:
        self.train = folder
        self._metrics = metrics

    @cached_property
    def events(self) -> list[Event]:
        """Starts, checkpoints, rollbacks and so on, the oldest first."""
        return list(read_lines(self.train / "events.jsonl", Event))

    @cached_property
    def samples(self) -> list[LoggedSample]:
        """The sample texts, in the order of the file."""
        return list(read_lines(self.train / "samples.jsonl", LoggedSample))

    @cached_property
    def logged(self) -> list[Line]:
        """All lines of metrics.jsonl, in the order of the file."""
        return list(read_lines(self.train / self._metrics, Line))

    @cached_property
    def lines(self) -> list[Line]:
        """Those that no change of the plan undid, repeated steps included. A start with another plan continues from a
        checkpoint; later steps in the log before it belong to the former plan. They may have had another learning rate,
        batch or text, and the new plan may end before them."""
        return [line for line in self.logged if not any(
            number > line.get("plan_changes", 0) and line["step"] > step for number, step in self._replanned)]

    @property
    def training_starts(self) -> list[Event]:
        """The events of the starts of training that came to their first step."""
        return [event for event in self.events if event["event"] in ("start", "resume")]

    @property
    def steps(self) -> list[Line]:
        """The last one of each step, in the order of the steps."""
        return [line for _, line in sorted({line["step"]: line for line in self.lines}.items())]

    @property
    def plan_changes(self) -> int:
        """How many starts continued under another plan."""
        return max((number for number, _ in self._replanned), default=0)

    @cached_property
    def _replanned(self) -> list[tuple[int, int]]:
        """(number, steps done) of each start that continued under another plan."""
        return [(event["number"], event["step"]) for event in self.events
                if event["event"] == PLAN_CHANGED and {"number", "step"} <= event.keys()]

    def newly_accepted(self, accepted: list[str]) -> list[str]:
        """The accepted changes of a start that no earlier start had."""
        before = [event["accepted"] for event in self.events if "accepted" in event] or [[]]
        return list(dict.fromkeys(accepted[len(before[-1]):]))


def read_metrics(path: str | Path) -> list[Line]:
    """The records of a run's train/metrics.jsonl, one per step, in order: for plots and computations.

    The file only grows. After a kill training continues from its last checkpoint and repeats the steps since then. A
    rollback also repeats steps, on other samples. So a step may have several lines: the last one counts, the others are
    of updates that are in no checkpoint. Lines that a change of the plan undid never count: see `TrainingRecords`. A
    last line that a kill truncated is skipped.

    Args:
        path: the file; a missing one has no steps. The events.jsonl next to it lists changes of the plan.

    Returns:
        Dictionaries with `step` (from 1), `loss` (nats per target token), `lr`, `grad_norm`, `tokens_per_s`,
        `samples` ([first, end) of the order), ...; a number that JSON cannot hold (NaN) is text.

    Raises:
        UserError: a line within the file is no such record: it is damaged.
    """
    path = Path(path)
    return TrainingRecords(path.parent, path.name).steps


def reordered(events: Sequence[Event]) -> list[int]:
    """After which steps the samples came in another order than before."""
    return [event.get("step", 0) for event in events if OTHER_ORDER in event.get("changes", ())]


ROLLBACKS = "rollbacks.json"


@dataclass(frozen=True)
class Rollback:
    """One rollback: from `step` (counted from 1) to the checkpoint after `back_to` steps.

    samples: what that step would have trained on, left out from now on. plan_sha256: the order that gives the numbers
    their meaning; for training in phases, up to the phase of the samples. Under another plan they exclude nothing. why:
    the spike, in a sentence.
    """

    step: int
    back_to: int
    samples: tuple[Range, ...]
    plan_sha256: str
    why: str


@dataclass(frozen=True)
class Rollbacks:
    """The content of the file, oldest first."""

    rollbacks: tuple[Rollback, ...]


def read_rollbacks(folder: Path) -> list[Rollback]:
    """The rollbacks of the train stage in `folder`, oldest first."""
    result = read_record(folder / ROLLBACKS, Rollbacks, "Put it back from a copy of the run.")
    return list(result.rollbacks) if result else []


def add_rollback(folder: Path, rollback: Rollback) -> None:
    """Store a rollback durably. To be called by one rank, before anything is loaded."""
    write_sealed(folder / ROLLBACKS, asdict(Rollbacks((*read_rollbacks(folder), rollback))))


def excluded_by(rollbacks: Sequence[Rollback], links: Collection[str]) -> Excluded:
    """The samples that these rollbacks leave out of an order. links: its hashes, one per phase."""
    return Excluded(part for rollback in rollbacks if rollback.plan_sha256 in links for part in rollback.samples)


def no_longer_left_out(rollbacks: Sequence[Rollback], links: Collection[str]) -> list[str]:
    """A message for each rollback that leaves nothing out of the order whose hashes are `links`."""
    return [f"samples {format_ranges(rollback.samples)}, left out by the rollback from step {rollback.step}, were in a "
            f"phase that has changed. These numbers are other text now, so they are no longer left out"
            for rollback in rollbacks if rollback.plan_sha256 not in links]


def is_abandoned(line: Line, rollbacks: Sequence[Rollback], links: Collection[str]) -> bool:
    """Whether a line is of a step that a later rollback undid, and that will see other samples."""
    later = excluded_by(rollbacks[line.get("rollbacks", 0):], links).ranges
    return bool(later) and line["samples"][1] > later[0][0]


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
    def attempts(self) -> list[Attempt]:
        """What the launcher did, in order."""
        return read_attempts(self.folder)

    @property
    def starts(self) -> list[Start]:
        """The starts of all stages, in order."""
        ends = {_start_of(event): event for event in self.attempts if event["event"] == "ended"}
        starts = []
        for event in self.attempts:
            if event["event"] == "attempt" and event.get("nodes"):
                end: Mapping[str, Any] = ends.get(_start_of(event)) or {}
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


def _start_of(event: Attempt) -> tuple[str, str, int, int]:
    """The start that an event belongs to."""
    return event["stage"], event["job"], event.get("restart", 0), event["start"]
