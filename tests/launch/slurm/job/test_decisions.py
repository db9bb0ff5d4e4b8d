"""What follows from a start's end: the whole table."""

from itertools import product

import pytest
import yaml

from drover.launch.host import StepEnd
from drover.launch.slurm.job.decisions import MOST_OUTSIDE, Outcome, decide, fruitless, unseen
from drover.launch.slurm.job.srun import read_end
from drover.launch.slurm.jobspec import JobSpec
from drover.pipeline.contract.state import StageState
from tests.launch.fake_job import NO_STEP
from tests.refusal import table

DONE, RUNNING, FAILED = StageState("done"), StageState("running"), StageState("failed", reason="bad data")
ASKED = StageState("preempted", step=40, reason="time limit", again=True)
CANCELLED = StageState("preempted", step=40, reason="the user had enough", again=False)
TERMINATED = StageState("preempted", step=40, reason="SIGTERM", again=False)
STATES = (None, RUNNING, DONE, FAILED, ASKED, CANCELLED, TERMINATED)


LOST = "srun: error: Node failure on n3\n"
REFUSED = "srun: error: n1: task 0: Exited with exit code 2\n"


def terms(later_links=False, requeue=True, max_restarts=3):
    """What a job may do."""
    return JobSpec("trial-train", "train", (), run="r", chain="c", links=1 + later_links, requeue=requeue,
                   max_restarts=max_restarts)


def kind(decision):
    return f"{decision.action} {decision.status} {decision.exit_status}"


@pytest.mark.parametrize("outcome, terms, expected", [
    # done: the manifest and the stage's word, whatever the exit status says
    (Outcome(DONE, committed=True, end=read_end(143, REFUSED), stopping=True), terms(), "leave done 0"),
    (Outcome(RUNNING, committed=True, end=StepEnd(137)), terms(), "leave done 0"),  # killed after its commit
    (Outcome(None, committed=True, end=StepEnd(0)), terms(), "leave done 0"),  # it was up to date
    # an old manifest beside a start that broke off
    (Outcome(None, committed=True, end=StepEnd(1)), terms(), "restart crashed 0"),
    # a word without a manifest
    (Outcome(DONE, committed=False), terms(), "restart crashed 0"),
    # user errors
    (Outcome(FAILED, end=StepEnd(143), hang="x", fruitless=9), terms(later_links=True), "stop failed 1"),
    (Outcome(None, end=read_end(143, REFUSED), again=True, fruitless=1), terms(), "restart crashed 0"),
    # requests to stop
    (Outcome(ASKED), terms(later_links=True, requeue=False), "leave preempted 0"),
    (Outcome(ASKED), terms(requeue=False), "stop preempted 1"),
    (Outcome(CANCELLED), terms(later_links=True), "stop preempted 1"),
    # the processes were told to end, but not the job: a preemption
    (Outcome(TERMINATED), terms(), "requeue preempted 0"),
    # told to end while the stage was at work
    (Outcome(RUNNING, end=read_end(143, LOST), stopping=True), terms(), "stop crashed 143"),
    # crashes and hangs
    (Outcome(RUNNING, end=StepEnd(143), fruitless=3), terms(max_restarts=3), "restart crashed 0"),
    (Outcome(RUNNING, hang="rank 2 is late", fruitless=4), terms(later_links=True), "stop hung 1"),
    # Slurm may still run the tasks: no second gang beside them
    (Outcome(RUNNING, end=StepEnd(137, abandoned=True), fruitless=1), terms(), "requeue crashed 0"),
])
def test_the_table(outcome, terms, expected):
    assert kind(decide(outcome, terms)) == expected


def test_what_holds_for_every_combination():
    flags = (False, True)
    ends = [read_end(status, said, given_up=given_up, abandoned=abandoned) for status, said, given_up, abandoned in
            product((0, 143), ("", LOST, REFUSED, NO_STEP, LOST + REFUSED), flags, flags)]
    for *known, requeue, links in product(STATES, flags, ends, ("", "late"), flags, flags, (0, 4), flags, flags):
        outcome, spec = Outcome(*known), terms(links, requeue)
        decision, end = decide(outcome, spec), outcome.end
        assert decision.reason and (decision.exit_status != 0) == (decision.action == "stop")
        assert outcome.committed or decision.status != "done"
        assert {  # exit status 0 lets the next stage start
            "leave": decision.status == "done" or links,
            "requeue": requeue and not outcome.stopping,
            "restart": end.started and not end.abandoned and outcome.fruitless <= spec.max_restarts
            and not outcome.stopping,
            "stop": decision.exit_status in (1, 143)}[decision.action]


def attempts(ends, begin=None):
    """The log of starts that ended with (status, newest checkpoint)."""
    found = [{"event": "job"}]
    for status, step in ends:
        found += [{"event": "attempt", "from": begin}, {"event": "ended", "status": status, "step": step}]
    return found


@pytest.mark.parametrize(("ends", "begin", "expected"), table("""
    [[crashed, null], [hung, null], [crashed, null]] -> null -> 3
    [[crashed, 10]] -> null -> 0
    [[crashed, 10]] -> 10 -> 1
    [[crashed, 10], [crashed, 10], [crashed, 20], [hung, 20]] -> null -> 1
    [[crashed, 10], [crashed, 10], [preempted, 10], [crashed, 10]] -> null -> 1
    [[crashed, 10], [crashed, 5]] -> null -> 1
    [[crashed, null], [requeued, null], [requeued, null], [crashed, null]] -> null -> 2""", *[yaml.safe_load] * 3))
def test_fruitless_starts(ends, begin, expected):
    """A checkpoint that they began from is of an earlier submission."""
    assert fruitless(attempts(ends, begin)) == expected


@pytest.mark.parametrize("down, most", [({"n3": "down*"}, 3), ({}, MOST_OUTSIDE)])
def test_ends_that_nobody_saw_again_and_again(down, most):
    for times in (most - 1, most):
        events = attempts([("crashed" if down else "requeued", None)] * times)
        found = unseen(RUNNING, False, down, False, None, events, terms())
        assert found.action == ("requeue" if times < most else "stop")
    assert kind(found) == "stop crashed 1" and found.final
    assert found.reason.startswith(f"given up after {most + 1} starts") and ("lost n3" in found.reason) == bool(down)
