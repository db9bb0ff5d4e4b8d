"""The record of training, a JSON object a line: train/metrics.jsonl, and beside it samples.jsonl and events.jsonl."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, TypedDict

from drover.pipeline.contract.state import Time
from drover.pipeline.core.files import Count, read_lines

PLAN_CHANGED = "plan_changed"
"""The event of a start that goes on along another plan. Its `number` counts such starts; each line of metrics.jsonl
says as `plan_changes` how many there had been before it. Numbers rather than times tell which came first: the clocks of
two nodes may differ, and what is taken up again from a copy may have lost lines."""


def is_range(numbers: list[int]) -> None:
    """ValueError unless these are a first number and an end."""
    if len(numbers) != 2:
        raise ValueError(f"{numbers[:5]} is no range")


class _Line(TypedDict):
    step: Count


class Line(_Line, total=False):
    """What of a line of metrics.jsonl others compute with."""

    samples: Annotated[list[Count], is_range]
    plan_changes: Count
    rollbacks: Count
    time: float
    step_s: float
    train_s: float
    look_s: float
    stall_s: float


class _Event(TypedDict):
    event: str


class Event(_Event, total=False):
    """What of a line of events.jsonl others compute with."""

    time: Time
    step: Count
    number: Count
    ranks: Count
    startup_s: float
    train_s: float
    look_s: float
    stall_s: float
    lost_s: float


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """The records of a run's train/metrics.jsonl, one per step, in order: what to plot or compute with.

    The file only grows. After a kill training goes on from its last checkpoint and does the steps since then again, and
    a rollback does some again on other samples, so a step may have several lines: its last one counts, the others are
    of updates that are in no checkpoint. Lines that a change of the plan undid never count: see `standing_lines`. A
    last line that a kill left torn is passed over.

    Args:
        path: the file; one that does not exist holds no step. The events.jsonl beside it tells of changes of the plan.

    Returns:
        Dictionaries with `step` (from 1), `loss` (nats per target token), `lr`, `grad_norm`, `tokens_per_s`,
        `samples` ([first, end) of the order), ...; a number that JSON cannot hold (NaN) stands as text.

    Raises:
        UserError: a line within the file is no such record: it is damaged.
    """
    return [record for _, record in sorted({record["step"]: record for record in standing_lines(Path(path))}.items())]


def standing_lines(path: Path) -> list[dict[str, Any]]:
    """The lines of a metrics.jsonl in the order of the file, repeated steps included, without those that a change of
    the plan undid: such a start goes on from a checkpoint, and later steps that were logged before it were steps of the
    former plan. They may have had another learning rate, batch or text, and the new plan may end before them."""
    changes = _plan_changes(path.parent)
    return [record for record in read_lines(path, Line)
            if not any(number > record.get("plan_changes", 0) and record["step"] > step for number, step in changes)]


def plan_changes(folder: Path) -> int:
    """How many starts of the train stage in `folder` have gone on along another plan."""
    return max((number for number, _ in _plan_changes(folder)), default=0)


def _plan_changes(folder: Path) -> list[tuple[int, int]]:
    """(number, steps done) of each change of the plan."""
    return [(event["number"], event["step"]) for event in read_lines(folder / "events.jsonl", Event)
            if event["event"] == PLAN_CHANGED and {"number", "step"} <= event.keys()]
