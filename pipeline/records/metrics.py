"""The records of training, one JSON object per line: train/metrics.jsonl, and next to it samples.jsonl and
events.jsonl."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, TypedDict

from drover.pipeline.contract.state import Time
from drover.pipeline.core.files import Count, read_lines

PLAN_CHANGED = "plan_changed"
"""The event of a start that continues under another plan or other accepted settings. Its `number` counts such starts.
Each line of metrics.jsonl has in `plan_changes` how many came before it. Numbers, not times, give the order: the clocks
of two nodes may differ, and a run restored from a copy may lack lines."""
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
    validation_bpb: dict[str, Any]


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
