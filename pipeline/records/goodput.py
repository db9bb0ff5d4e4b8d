"""Goodput: which share of the time since a run's first start was spent on productive steps, and what the rest was for.

Computed from the records of training and the launcher: train/events.jsonl, train/metrics.jsonl, train/hangs, and
launch/attempts/ if a launcher started the run. Without torch: the launcher shows it, too.

The records of one start of training make a `Start`. Training itself measures steps, checkpoint stalls, and validation
and sampling; these are summed. The time between the end of one start and the first step of the next is attributed to
the launcher's activity (queue, preflight, start). Time without any record is `other`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from math import inf
from pathlib import Path

from drover.pipeline.contract.state import KILLED, read_attempts
from drover.pipeline.core.files import Record, read_lines
from drover.pipeline.records.hangs import HANGS, read_hang
from drover.pipeline.records.metrics import Event, Line

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
    VALIDATION: "measuring validation text, and sample texts",
    STOPPED: "between a stop on request and the next start",
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
class Start:
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
class Goodput:
    """How the time of a run was spent: `effective_s` and `lost` add up to `wall_s`.

    Attributes:
        begun, until: seconds since 1970.
        lost: seconds by cause, in the order of CAUSES.
        starts: of training, in order.
        notes: remarks on the figures.
    """

    begun: float
    until: float
    wall_s: float
    effective_s: float
    lost: dict[str, float]
    starts: tuple[Start, ...]
    notes: tuple[str, ...] = ()

    @property
    def share(self) -> float:
        """Effective time divided by wall time."""
        return self.effective_s / self.wall_s if self.wall_s > 0 else 0.0


def goodput(run_folder: Path) -> Goodput | None:
    """The goodput of a run until its end or last sign of life; None if training has not started a step."""
    train = run_folder / "train"
    starts = _starts(list(read_lines(train / "events.jsonl", Event)), list(read_lines(train / "metrics.jsonl", Line)))
    if not starts:
        return None
    launcher = _launcher(run_folder, starts[0].began)
    begun, hangs = _begin(starts[0].began, launcher), _hang_times(train)
    for start, later in _with_next(starts):
        _end(start, launcher, hangs, later.began if later else inf)
    last = starts[-1]
    lost = dict.fromkeys(CAUSES, 0.0)
    _between(lost, launcher, begun, starts[0].began, starts[0].ready, STARTUP)
    for start, later in _with_next(starts):
        for cause, seconds in start.lost.items():
            lost[cause] += seconds
        if later:
            _between(lost, launcher, start.end, later.began, later.ready, start.then)
    lost[RECOMPUTED] += max(0.0, sum(start.done_s for start in starts) - last.train_s)
    rest = last.end - begun - last.train_s - sum(lost.values())
    lost[OTHER] += max(0.0, rest)
    notes = (f"The records add up to {-rest:.1f} s more than the clock: clocks of nodes differ.",)
    return Goodput(begun, last.end, last.train_s + sum(lost.values()), last.train_s, lost, tuple(starts),
                   notes if rest < -SKEW_S else ())


def first_start(run_folder: Path) -> float | None:
    """When training of this run first started, as `goodput` counts it; None if it has not. Seconds since 1970."""
    events = read_lines(run_folder / "train/events.jsonl", Event)
    began = next((_seconds(event["time"]) - event["startup_s"] for event in events if event.keys() >= _STARTED), None)
    return None if began is None else _begin(began, _launcher(run_folder, began))


def _begin(began: float, launcher: Sequence[Record]) -> float:
    """The start of the job in which training first started; without a launcher, of its process."""
    return min([began, *(record["at"] for record in launcher[:1])])


def _starts(events: Sequence[Record], lines: Iterable[Record]) -> list[Start]:
    """The records that training itself wrote, by start."""
    result: list[Start] = []
    for event in events:
        if event["event"] in ("start", "resume") and event.keys() >= _STARTED:
            ready = _seconds(event["time"])
            result.append(Start(ready - event["startup_s"], ready, event["step"], event.get("ranks", 1),
                               bool(event.get("job"))))
    marks: list[list[Record]] = [[] for _ in result]
    ready_at = [start.ready for start in result]
    for record in [*({**event, "time": _seconds(event["time"])} for event in events if "time" in event),
                   *(line for line in lines if line.keys() >= _COUNTED)]:
        # The event is stamped to the millisecond, and so is the clock of the lines.
        if (number := bisect_right(ready_at, record["time"])) > 0:
            marks[number - 1].append(record)
    for start, own in zip(result, marks, strict=True):
        _account(start, sorted(own, key=lambda record: record["time"]))
    return result


def _account(start: Start, marks: Sequence[Record]) -> None:
    """Sum up the records of one start, in the order of time."""
    start.end, start.last = start.ready, start.first
    begun, looked = 0.0, 0.0
    for record in marks:
        start.end = record["time"]
        kind = record.get("event")
        start.lose(STALL, record.get("stall_s", 0.0))
        looked = record.get("look_s", looked)
        if kind in ("start", "resume", "rolled_back") and record.keys() >= _COUNTED:
            start.done_s += start.train_s - begun
            begun = start.train_s = record["train_s"]
            start.last = record["step"]
            start.lose(RECOMPUTED, record.get("lost_s", 0.0))
        elif kind is None:
            start.train_s, start.last = record["train_s"], record["step"]
        elif kind in ("stop", "finish"):
            start.why = FINISHED if kind == "finish" else f"asked to stop ({record.get('reason', '')})"
    start.done_s += start.train_s - begun
    start.lose(VALIDATION, looked)


def _end(start: Start, launcher: Sequence[Record], hangs: Sequence[float], later: float) -> None:
    """How a start ended, and the cause of the time after it."""
    closing = next((record for record in launcher if record["event"] == "ended"
                    and start.end - SKEW_S <= record["at"] <= later + SKEW_S), None)
    hung = next((at for at in hangs if start.end <= at <= later), None)
    start.then = OTHER if closing else QUEUE if start.launched else STOPPED
    if start.why:
        return
    if hung is not None or (closing and closing.get("status") == "hung"):
        end = max(start.end, closing["at"] if closing else hung or 0.0)
        start.lose(HANG, end - start.end)
        start.end, start.why = end, "hung"
    elif closing:
        start.end, start.why = max(start.end, closing["at"]), str(closing.get("status", ""))
    elif later < inf:
        start.why = "ended without a record"
    if closing and closing.get("reason"):
        start.why = f"{start.why}: {closing['reason']}"


def _between(lost: dict[str, float], launcher: Sequence[Record], end: float, began: float, ready: float,
             cause: str) -> None:
    """Share out the time from `end` of one start over `began` of the next to its first step, by what was going on."""
    inside = [record for record in launcher if end - SKEW_S <= record["at"] <= ready]
    at = end
    for record in sorted([*inside, {"event": "process", "at": began}], key=lambda record: record["at"]):
        passed = max(0.0, min(record["at"], ready) - at)
        tried = min(passed, record.get("seconds", 0.0)) if record["event"] == "preflight" else 0.0
        hung = record["event"] == "ended" and record.get("status") == "hung"
        lost[PREFLIGHT] += tried
        lost[HANG if hung else cause] += passed - tried
        at = max(at, min(record["at"], ready))
        cause = AFTER.get(record.get("next", ""), QUEUE) if record["event"] in ("ended", KILLED) else STARTUP
    lost[cause] += max(0.0, ready - at)


def _launcher(run_folder: Path, began: float) -> list[Record]:
    """What the launcher wrote of train, from the job on in which training first began."""
    result = [{**record, "at": _seconds(record["at"])} for record in read_attempts(run_folder)
             if record.get("stage") == "train"]
    jobs = [record["at"] for record in result if record["event"] == "job" and record["at"] <= began + SKEW_S]
    return [record for record in result if record["at"] >= max(jobs, default=inf)]


def _hang_times(train_folder: Path) -> list[float]:
    """The last time at which ranks recorded a hang, for each start."""
    written = [max((record.at for record in read_hang(folder)), default=None)
               for folder in (train_folder / HANGS).glob("*")]
    return sorted(at for at in written if at is not None)


def _with_next(starts: Sequence[Start]) -> Iterable[tuple[Start, Start | None]]:
    return zip(starts, [*starts[1:], None], strict=True)


def _seconds(time: str) -> float:
    return datetime.fromisoformat(time).timestamp()
