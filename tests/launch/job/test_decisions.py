"""What follows from a start's end: the whole table."""

from dataclasses import replace
from itertools import product

import pytest
import yaml

from drover.launch.job.decisions import MOST_REQUEUED, Outcome, decide, fruitless, unseen
from drover.launch.job.spec import JobSpec
from drover.launch.job.srun import read_end
from drover.pipeline.contract.state import StageState
from tests.launch.fake_job import NO_STEP
from tests.refusal import table

STATES = {None: None, "done": StageState("done"), "running": StageState("running"),
          "failed": StageState("failed", reason="bad data"),
          "asked": StageState("preempted", step=40, reason="time limit", again=True),
          "cancelled": StageState("preempted", step=40, reason="the user had enough"),
          "terminated": StageState("preempted", step=40, reason="SIGTERM")}
LOST = "srun: error: Node failure on n3"
REFUSED = "srun: error: n1: task 0: Exited with exit code 2"


def terms(later_links=False, requeue=True, max_restarts=3):
    """What a job may do."""
    return JobSpec("trial-train", "train", (), run="r", chain="c", links=1 + later_links, requeue=requeue,
                   max_restarts=max_restarts)


@pytest.mark.parametrize("why, state, end, outcome, rules, expected", table(f"""
    it is done, whatever the exit status says -> done -> {{status: 143, messages: {REFUSED!r}}} -> \
{{committed: true, stopping: true}} -> {{}} -> leave done 0
    killed after its commit -> running -> {{status: 137}} -> {{committed: true}} -> {{}} -> leave done 0
    it was up to date -> null -> {{status: 0}} -> {{committed: true}} -> {{}} -> leave done 0
    an old manifest beside a start that broke off -> null -> {{status: 1}} -> {{committed: true}} -> {{}} -> \
restart crashed 0
    a word without a manifest -> done -> {{status: 0}} -> {{}} -> {{}} -> restart crashed 0
    the user's error -> failed -> {{status: 143}} -> {{hang: x, fruitless: 9}} -> {{later_links: true}} -> stop failed 1
    an earlier start did not refuse this -> null -> {{status: 143, messages: {REFUSED!r}}} -> \
{{again: true, fruitless: 1}} -> {{}} -> restart crashed 0
    asked to stop -> asked -> {{status: 0}} -> {{}} -> {{later_links: true, requeue: false}} -> leave preempted 0
    asked to stop, and nothing goes on -> asked -> {{status: 0}} -> {{}} -> {{requeue: false}} -> stop preempted 1
    cancelled -> cancelled -> {{status: 0}} -> {{}} -> {{later_links: true}} -> stop preempted 1
    the processes were told to end, but not the job: a preemption -> terminated -> {{status: 0}} -> {{}} -> {{}} -> \
requeue preempted 0
    told to end while the stage was at work -> running -> {{status: 143, messages: {LOST!r}}} -> {{stopping: true}} -> \
{{}} -> stop crashed 143
    the last crash that is allowed -> running -> {{status: 143}} -> {{fruitless: 3}} -> {{max_restarts: 3}} -> \
restart crashed 0
    one hang too many -> running -> {{status: 0}} -> {{hang: rank 2 is late, fruitless: 4}} -> \
{{later_links: true}} -> stop hung 1
    Slurm may still run the tasks, so there is no second gang -> running -> {{status: 137, abandoned: true}} -> \
{{fruitless: 1}} -> {{}} -> requeue crashed 0""", str, *[yaml.safe_load] * 4))
def test_the_table(why, state, end, outcome, rules, expected):
    end = read_end(**{"messages": "", **end})
    decision = decide(Outcome(STATES[state], end=end, **outcome), terms(**rules))
    assert f"{decision.action} {decision.status} {decision.exit_status}" == expected, why


def test_of_a_stage_of_ones_own_that_did_nothing_the_likely_cause_is_named():
    for module, expected in (("drover.pipeline.train", False), ("words", True)):
        spec = replace(terms(), command=("python", "-m", module))
        reason = decide(Outcome(end=read_end(0, "")), spec).reason
        assert "is not done" in reason and ("__main__" in reason) == expected


def test_what_holds_for_every_combination():
    flags = (False, True)
    ends = [read_end(status, messages, given_up=given_up, abandoned=abandoned)
            for status, messages, given_up, abandoned in
            product((0, 143), ("", LOST, REFUSED, NO_STEP, f"{LOST}\n{REFUSED}"), flags, flags)]
    states = STATES.values()
    for *known, requeue, links in product(states, flags, ends, ("", "late"), flags, flags, (0, 4), flags, flags):
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


@pytest.mark.parametrize("ends, begin, expected", table("""
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


@pytest.mark.parametrize("down, most", [({"n3": "down*"}, 3), ({}, MOST_REQUEUED)])
def test_ends_that_nobody_saw_again_and_again(down, most):
    for times in (most - 1, most):
        events = attempts([("crashed" if down else "requeued", None)] * times)
        found = unseen(STATES["running"], False, down, False, None, events, terms())
        assert found.action == ("requeue" if times < most else "stop")
    assert (found.status, found.exit_status) == ("crashed", 1) and found.final
    assert found.reason.startswith(f"given up after {most + 1} starts") and ("lost n3" in found.reason) == bool(down)
