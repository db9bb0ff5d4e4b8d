"""Goodput: which share of the time since a run's first start was spent on productive steps, and what the rest was for.

Computed from the records of training and the launcher: train/events.jsonl, train/metrics.jsonl, train/hangs, and
launch/attempts/ if a launcher started the run. Without torch: the launcher shows it, too.

The records of one start of training make a `TrainingStart`. Training itself measures steps, checkpoint stalls, and
validation and sampling; these are summed. The time between the end of one start and the first step of the next is
attributed to the launcher's activity (queue, preflight, start). Time without any record is `other`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from math import inf
from operator import attrgetter, itemgetter
from pathlib import Path
from typing import Any

from drover.pipeline.contract.state import KILLED
from drover.pipeline.records.hangs import HANGS, read_hang
from drover.pipeline.records.metrics import RunFacts

QUEUE, PREFLIGHT, STARTUP, STALL = "queue", "preflight", "start-up", "checkpoint stall"
RECOMPUTED, HANG, VALIDATION = "recomputed steps", "hang", "validation and sampling"
STOPPED, OTHER = "stopped", "other"
CAUSES = {
    QUEUE: "waiting for Slurm between two allocations",
    PREFLIGHT: "testing the nodes before training",
    STARTUP: "from the start of a job or of its ranks to the first step",
    STALL: "the loop waited for a checkpoint",
    RECOMPUTED: "steps that were done, and undone by a restart or rollback",
    HANG: "from the last step to the end of a start that hung",
    VALIDATION: "measuring validation text, sample texts, and pauses for the scores of checkpoints",
    STOPPED: "between a stop on request, or the end of training, and the next start",
    OTHER: "the step in which a start was killed, noticing that it was, writing logs",
}
"""Causes of lost time, and their meaning."""
AFTER = {"restart": STARTUP, "stop": STOPPED}
"""The launcher's next action after a start, and the cause of the time that follows; other actions wait in the queue."""
FINISHED = "finished"
SKEW_S = 1.0
"""Clocks of nodes may differ by this many seconds without a note."""
_COUNTED = {"time", "step", "train_s"}
_STARTED = {*_COUNTED, "startup_s"}
"""Fields of a record from which time is computed."""


@dataclass
class TrainingStart:
    """One start of training, from the start of its process to its last sign of life.

    Attributes:
        began, ready, end: of its process, its first step, its end; seconds since 1970.
        first, last: steps done before it, and at its end.
        train_s: time of productive steps at its end; done_s: time of all steps that it did.
        lost: seconds by cause, within it.
        why: how it ended, in words; empty while it may be running.
        then: the cause of the time after it, until the launcher records another.
    """

    began: float
    ready: float
    first: int
    ranks: int
    launched: bool
    end: float = 0.0
    last: int = 0
    train_s: float = 0.0
    done_s: float = 0.0
    lost: dict[str, float] = field(default_factory=dict)
    why: str = ""
    then: str = STOPPED

    def lose(self, cause: str, seconds: float) -> None:
        """Count lost time."""
        self.lost[cause] = self.lost.get(cause, 0.0) + max(0.0, seconds)


@dataclass(frozen=True)
class Action:
    """What the launcher did at a time (seconds since 1970), with fields of `contract.state.Attempt`; or that the
    process of a start began."""

    at: float
    event: str
    status: str = ""
    reason: str = ""
    next: str = ""
    seconds: float = 0.0


@dataclass(frozen=True)
class Goodput:
    """How the time of a run was spent: `effective_s` and `lost` add up to `wall_s`.

    Attributes:
        started: when training first started, or its job; seconds since 1970.
        lost: seconds by cause, in the order of CAUSES.
        starts: of training, in order.
        notes: remarks on the figures.
    """

    started: float
    wall_s: float
    effective_s: float
    lost: dict[str, float]
    starts: list[TrainingStart]
    notes: list[str]

    @property
    def share(self) -> float:
        """Effective time divided by wall time."""
        return self.effective_s / self.wall_s if self.wall_s > 0 else 0.0


def goodput(facts: RunFacts) -> Goodput | None:
    """The goodput of a run until its end or last sign of life; None if training has not started a step."""
    starts = _starts(facts)
    if not starts:
        return None
    actions = _launcher_actions(facts, starts[0].began)
    run_began = _run_began(starts[0].began, actions)
    hangs = _hang_times(facts.train)
    lost = dict.fromkeys(CAUSES, 0.0)
    _between(lost, actions, run_began, starts[0], STARTUP)
    for start, later in zip(starts, [*starts[1:], None], strict=True):
        _end(start, actions, hangs, later.began if later else inf)
        for cause, seconds in start.lost.items():
            lost[cause] += seconds
        if later:
            _between(lost, actions, start.end, later, start.then)
    last = starts[-1]
    lost[RECOMPUTED] += max(0.0, sum(start.done_s for start in starts) - last.train_s)
    rest = last.end - run_began - last.train_s - sum(lost.values())
    lost[OTHER] += max(0.0, rest)
    notes = [f"The records add up to {-rest:.1f} s more than the clock: clocks of nodes differ."] if rest < -SKEW_S \
        else []
    return Goodput(run_began, last.train_s + sum(lost.values()), last.train_s, lost, starts, notes)


def run_s(facts: RunFacts) -> float:
    """Seconds of all starts of training, each to its last record."""
    return sum(start.end - start.began for start in _starts(facts))


def first_start(facts: RunFacts) -> float | None:
    """When training of this run first started, as `goodput` counts it; None if it has not. Seconds since 1970."""
    began = next((_seconds(event["time"]) - event["startup_s"] for event in facts.events if _is_start(event)), None)
    return None if began is None else _run_began(began, _launcher_actions(facts, began))


def _run_began(began: float, actions: Sequence[Action]) -> float:
    """The start of the job in which training first started; without a launcher, of its process."""
    return min([began, *(action.at for action in actions[:1])])


def _is_start(record: Mapping[str, Any]) -> bool:
    return record.get("event") in ("start", "resume") and record.keys() >= _STARTED


def _starts(facts: RunFacts) -> list[TrainingStart]:
    """The records that training itself wrote, by start."""
    starts: list[TrainingStart] = []
    records: list[list[Mapping[str, Any]]] = []
    # The event is stamped to the millisecond, and so is the clock of the lines. Of equal times events come first.
    timed: list[tuple[float, Mapping[str, Any]]] = [
        *((_seconds(event["time"]), event) for event in facts.events if "time" in event),
        *((line["time"], line) for line in facts.logged if line.keys() >= _COUNTED)]
    for time, record in sorted(timed, key=itemgetter(0)):
        if _is_start(record):
            starts.append(TrainingStart(time - record["startup_s"], time, record["step"], record.get("ranks", 1),
                                        bool(record.get("job"))))
            records.append([])
        if starts:
            starts[-1].end = time
            records[-1].append(record)
    for start, own in zip(starts, records, strict=True):
        _account(start, own)
    return starts


def _account(start: TrainingStart, records: Sequence[Mapping[str, Any]]) -> None:
    """Sum up the records of one start, in the order of time."""
    counted_from, look_s = 0.0, 0.0
    for record in records:
        kind = record.get("event")
        start.lose(STALL, record.get("stall_s", 0.0))
        look_s = record.get("look_s", look_s)
        if kind in ("start", "resume", "rolled_back") and record.keys() >= _COUNTED:
            start.done_s += start.train_s - counted_from
            counted_from = start.train_s = record["train_s"]
            start.last = record["step"]
            start.lose(RECOMPUTED, record.get("lost_s", 0.0))
        elif kind is None:
            start.train_s, start.last = record["train_s"], record["step"]
        elif kind == "finish":
            start.why = FINISHED
        elif kind == "stop":
            start.why = f"asked to stop ({record.get('reason', '')})"
    start.done_s += start.train_s - counted_from
    start.lose(VALIDATION, look_s)


def _end(start: TrainingStart, actions: Sequence[Action], hangs: Sequence[float], later: float) -> None:
    """How a start ended, and the cause of the time after it. later: when the next one began."""
    closing = next((action for action in actions if action.event == "ended"
                    and start.end - SKEW_S <= action.at <= later + SKEW_S), None)
    hung = next((at for at in hangs if start.end <= at <= later), None)
    start.then = OTHER if closing else QUEUE if start.launched else STOPPED
    if start.why:
        return
    if hung is not None or (closing and closing.status == "hung"):
        end = max(start.end, closing.at if closing else hung or 0.0)
        start.lose(HANG, end - start.end)
        start.end, start.why = end, "hung"
    elif closing:
        start.end, start.why = max(start.end, closing.at), closing.status
    elif later < inf:
        start.why = "ended without a record"
    if closing and closing.reason:
        start.why = f"{start.why}: {closing.reason}"


def _between(lost: dict[str, float], actions: Sequence[Action], end: float, later: TrainingStart, cause: str) -> None:
    """Share out the time from the end of a start to the first step of the next by what was going on."""
    at = end
    inside = [action for action in actions if end - SKEW_S <= action.at <= later.ready]
    for action in sorted([*inside, Action(later.began, "process")], key=attrgetter("at")):
        until = min(action.at, later.ready)
        passed = max(0.0, until - at)
        tried = min(passed, action.seconds) if action.event == "preflight" else 0.0
        lost[PREFLIGHT] += tried
        lost[HANG if action.event == "ended" and action.status == "hung" else cause] += passed - tried
        at = max(at, until)
        ended = STOPPED if action.status == "done" else AFTER.get(action.next, QUEUE)
        cause = ended if action.event in ("ended", KILLED) else STARTUP
    lost[cause] += max(0.0, later.ready - at)


def _launcher_actions(facts: RunFacts, began: float) -> list[Action]:
    """What the launcher did for train, from the job on in which training first began."""
    actions = [Action(_seconds(event["at"]), event["event"], event.get("status", ""), event.get("reason", ""),
                      event.get("next", ""), event.get("seconds", 0.0))
               for event in facts.attempts if event["stage"] == "train"]
    jobs = [action.at for action in actions if action.event == "job" and action.at <= began + SKEW_S]
    return [action for action in actions if action.at >= max(jobs, default=inf)]


def _hang_times(train: Path) -> list[float]:
    """The last time at which ranks recorded a hang, for each start."""
    return sorted(max(record.at for record in hang) for folder in (train / HANGS).glob("*")
                  if (hang := read_hang(folder)))


def _seconds(time: str) -> float:
    return datetime.fromisoformat(time).timestamp()
