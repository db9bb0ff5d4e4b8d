"""What follows from a start's end: the whole table."""

from itertools import product

import pytest
import yaml

from drover.launch.job.decisions import Outcome, decide, fruitless
from drover.launch.job.host import JobSpec
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


def terms(requeue=True, max_restarts=3):
    """What a job may do."""
    return JobSpec("trial-train", "train", (), run="r", chain="c", requeue=requeue, max_restarts=max_restarts)


@pytest.mark.parametrize("why, state, end, outcome, rules, expected", table(f"""
    it is done, whatever the exit status says -> done -> {{status: 143, messages: {REFUSED!r}}} -> \
{{committed: true, stopping: true}} -> {{}} -> leave done
    killed after its commit -> running -> {{status: 137}} -> {{committed: true}} -> {{}} -> leave done
    it was up to date -> null -> {{status: 0}} -> {{committed: true}} -> {{}} -> leave done
    an old manifest beside a start that broke off -> null -> {{status: 1}} -> {{committed: true}} -> {{}} -> \
restart crashed
    a word without a manifest -> done -> {{status: 0}} -> {{}} -> {{}} -> restart crashed
    the user's error -> failed -> {{status: 143}} -> {{hang: x, fruitless: 9}} -> {{}} -> stop failed
    an earlier start did not refuse this -> null -> {{status: 143, messages: {REFUSED!r}}} -> \
{{again: true, fruitless: 1}} -> {{}} -> restart crashed
    asked to stop -> asked -> {{status: 0}} -> {{}} -> {{}} -> requeue preempted
    asked to stop, and nothing goes on -> asked -> {{status: 0}} -> {{}} -> {{requeue: false}} -> stop preempted
    cancelled -> cancelled -> {{status: 0}} -> {{}} -> {{}} -> stop preempted
    the processes were told to end, but not the job: a preemption -> terminated -> {{status: 0}} -> {{}} -> {{}} -> \
requeue preempted
    told to end while the stage was at work -> running -> {{status: 143, messages: {LOST!r}}} -> {{stopping: true}} -> \
{{}} -> stop crashed
    the last crash that is allowed -> running -> {{status: 143}} -> {{fruitless: 3}} -> {{max_restarts: 3}} -> \
restart crashed
    one hang too many -> running -> {{status: 0}} -> {{hang: rank 2 is late, fruitless: 4}} -> \
{{}} -> stop hung
    Slurm may still run the tasks, so there is no second gang -> running -> {{status: 137, abandoned: true}} -> \
{{fruitless: 1}} -> {{}} -> requeue crashed""", str, *[yaml.safe_load] * 4))
def test_the_table(why, state, end, outcome, rules, expected):
    end = read_end(**{"messages": "", **end})
    decision = decide(Outcome(STATES[state], end=end, **outcome), terms(**rules))
    assert f"{decision.action} {decision.status}" == expected, why


def test_what_holds_for_every_combination():
    flags = (False, True)
    ends = [read_end(status, messages, given_up=given_up, abandoned=abandoned)
            for status, messages, given_up, abandoned in
            product((0, 143), ("", LOST, REFUSED, NO_STEP, f"{LOST}\n{REFUSED}"), flags, flags)]
    states = STATES.values()
    for *known, requeue in product(states, flags, ends, ("", "late"), flags, flags, (0, 4), flags):
        outcome, spec = Outcome(*known), terms(requeue)
        decision, end = decide(outcome, spec), outcome.end
        assert decision.reason and (outcome.committed or decision.status != "done")
        assert {  # a job that does not stop lets the next stage start
            "leave": decision.status == "done",
            "requeue": requeue and not outcome.stopping,
            "restart": end.started and not end.abandoned and outcome.fruitless <= spec.max_restarts
            and not outcome.stopping,
            "stop": True}[decision.action]


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
    [[crashed, 10], [failed, 10], [of a later version, 10]] -> 10 -> 3
    [[crashed, null], [requeued, null], [requeued, null], [crashed, null]] -> null -> 2""", *[yaml.safe_load] * 3))
def test_fruitless_starts(ends, begin, expected):
    """A checkpoint that they began from is of an earlier submission."""
    assert fruitless(attempts(ends, begin)) == expected
