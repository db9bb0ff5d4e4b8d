"""What the runner does when a start of a stage has ended: pure, from what is known to what is done.

Exit statuses come last, because a killed rank, a cancelled job and a preempted one can have the same. The manifest and
the stage's own final status (`STATE.json`, if it is of this job and start) come first. Of the job's spec, `requeue` and
`max_restarts` count.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from drover.launch.job.host import JobSpec, StepEnd
from drover.pipeline.contract.state import StageState
from drover.pipeline.core.errors import UserError

NOTHING = ('ended as if all were well, but is not done (the module of a stage of your own must call stage_main at its '
           'end, under `if __name__ == "__main__":`)')
REQUEUED = "requeued"
"""Status of a start that Slurm ended and queued again, and nothing failed: a preemption, `scontrol requeue`."""


@dataclass(frozen=True)
class Outcome:
    """What a start of a stage left.

    Attributes:
        state: the stage's final status in this start; None if it wrote none.
        committed: the manifest is there.
        end: of its processes.
        hang: what the account of a hang says; empty if nothing hung.
        stopping: the runner itself received a request to end.
        again: the job had started the stage before.
        fruitless: starts in a row, with this one, that brought no new checkpoint.
        others: nodes were lost, and the job has enough others.
    """

    state: StageState | None = None
    committed: bool = False
    end: StepEnd = StepEnd(0)  # noqa: RUF009 - it is immutable
    hang: str = ""
    stopping: bool = False
    again: bool = False
    fruitless: int = 0
    others: bool = False


@dataclass(frozen=True)
class Decision:
    """What to do, and why.

    action: `leave` ends the job well, `stop` badly.
    final: the stage's state is to become `failed`.
    """

    action: Literal["leave", "restart", "requeue", "stop"]
    status: str
    reason: str
    final: bool = False


STOPPED = Decision("stop", "preempted", "a request to end came (Ctrl-C, a cancelled job or its time limit)")


def decide(outcome: Outcome, spec: JobSpec) -> Decision:
    """What follows from a start's end."""
    state, end = outcome.state, outcome.end
    status = state.status if state else None
    # Without a record in this start, a stage that ended well was done before and did nothing. One that failed before
    # its first record may have an old manifest, which it was about to replace.
    if outcome.committed and (status in ("done", "running") or (status is None and end.status == 0)):
        return Decision("leave", "done", "done")
    if state and status == "failed":
        return Decision("stop", "failed", state.reason or "the stage gave up")
    if state and status == "preempted":
        return _preempted(state, spec, stopping=outcome.stopping)
    if outcome.stopping:
        return Decision("stop", "crashed", f"{end.cause}, and a request to end came") if end.lost else STOPPED
    # What an earlier start did not refuse is a trace of its end, such as a lock that a slow file system still holds.
    if end.exit_code == UserError.exit_status and not outcome.again:
        return Decision("stop", "failed", end.cause or "the stage refused to start", final=True)
    unknown = f"ended with exit status {end.status} without a word" if end.status else NOTHING
    decision = Decision("restart", "hung" if outcome.hang else "crashed", outcome.hang or end.cause or unknown)
    if outcome.fruitless > spec.max_restarts:
        return given_up(decision, outcome.fruitless, spec)
    if (end.started or outcome.others) and not end.abandoned:
        return decision
    return requeue(decision.status, decision.reason, spec)


def requeue(status: str, reason: str, spec: JobSpec) -> Decision:
    """Queue the job again, where that is allowed: too few of its nodes are left, or too little of its time."""
    decision = Decision("requeue", status, reason)
    return decision if spec.requeue else without_requeue(decision, "jobs may not requeue themselves here")


def without_requeue(decision: Decision, refusal: str) -> Decision:
    """What is done instead of a requeue that Slurm refused or that is not allowed."""
    return replace(decision, action="stop", reason=f"{decision.reason}; {refusal}: submit the same command again")


def without_bad_nodes(bad: Mapping[str, str], spec: JobSpec, *, left_out: bool, others: bool) -> Decision:
    """What follows from a preflight that found bad nodes. left_out: the next submission does without them. others: the
    job has enough other nodes."""
    reason = f"preflight found a bad node: {'; '.join(f'{node}: {cause}' for node, cause in bad.items())}"
    if others:
        return Decision("restart", "preempted", f"{reason}; the job continues with its other nodes")
    if left_out or not spec.requeue:
        return Decision("stop", "failed", f"{reason}; submit the same command again: Slurm then leaves out a node that "
                                          f"failed twice within a day", final=True)
    return Decision("requeue", "preempted", reason)


def fruitless(events: Iterable[Mapping[str, Any]]) -> int:
    """Failures in a row, up to the newest, without a checkpoint in between. Starts that were ended from outside do not
    count.

    events: logged of one stage by one submission's jobs, or by one job (an array's elements do not follow each other).
    """
    count = 0
    best = None
    for event in events:
        if event["event"] == "attempt" and best is None:
            best = event.get("from") or 0
        if event["event"] != "ended":
            continue
        step = event.get("step") or 0
        if best is not None and step > best:
            count = 0
            best = step
        elif event.get("status") in ("done", "preempted"):
            count = 0
        elif event.get("status") != REQUEUED:
            count += 1
    return count


def _preempted(state: StageState, spec: JobSpec, *, stopping: bool) -> Decision:
    where = f" after step {state.step}" if state.step is not None else ""
    reason = f"asked to stop ({state.reason}){where}"
    # A cancel signals the runner too. Of a preemption (GraceTime) Slurm warns the processes alone, and a failure then
    # would cancel the rest of the chain.
    if not stopping and (state.again or state.reason.startswith("SIGTERM")):
        return requeue("preempted", reason, spec)
    return Decision("stop", "preempted", reason if stopping else f"{reason}; the same command continues from there")


def given_up(last: Decision, count: int, spec: JobSpec) -> Decision:
    """The end of the stage after so many starts in a row without a new checkpoint. last: about the last of them."""
    reason = f"given up after {count} starts in a row without a new checkpoint (launch.max_restarts=" \
             f"{spec.max_restarts}); the last one: {last.reason}"
    # After the first start nothing was given up: no restart is allowed.
    return replace(last, action="stop", reason=last.reason if count == 1 else reason, final=True)
