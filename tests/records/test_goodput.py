"""Where the time went: planted figures are found again, every part in its place, and the parts are the whole."""

import math

import pytest

from drover.pipeline.records.goodput import CAUSES, first_start, goodput, run_s
from drover.pipeline.records.metrics import RunFacts
from tests.records.recorded_time import Recorded


@pytest.fixture
def run(tmp_path):
    return Recorded(tmp_path)


def parts(result):
    """What was lost, by cause; the parts must be the whole."""
    assert math.isclose(result.effective_s + sum(result.lost.values()), result.wall_s, abs_tol=1e-6)
    assert list(result.lost) == list(CAUSES) and all(seconds >= 0 for seconds in result.lost.values())
    return {cause: round(seconds, 2) for cause, seconds in result.lost.items() if seconds > 0.01}


LAUNCHED = """
    launcher job job=7; wait 9; launcher preflight job=7 seconds=8; wait 2; launcher attempt job=7;
    start 20 job=7; steps 6; wait 5; launcher ended job=7 status=crashed reason='rank 1 was killed' next=restart;
    wait 4; launcher attempt job=7; start 21 step=4 job=7; steps 3; hang 600 key=7.0.2; wait 10;
    launcher ended job=7 status=hung reason='rank 3 (n4) was late' next=restart;
    launcher attempt job=7; wait 15; launcher ended job=7 status=crashed reason=exit next=requeue; wait 1000;
    launcher job job=7; wait 9; launcher preflight job=7 seconds=9; launcher attempt job=7;
    start 22 step=4 job=7; steps 10; end stop stall_s=2 reason=SIGTERM; wait 1;
    launcher ended job=7 status=preempted reason=SIGTERM next=stop"""
"""On Slurm: preflight, a crash and a restart inside the allocation, a hang, a start that crashes before its first step,
a requeue, and a stop for good."""
QUEUED = """launcher job job=7; launcher attempt job=7; start 20 job=7; steps 3; end stop reason=SIGUSR2;
    launcher ended job=7 status=preempted reason=SIGUSR2 next=requeue"""
KILLED = "start 20; steps 8 {0}; save 0; steps 4 {0}; wait 503; start 30 step=8; steps 12 {0}; end finish"


@pytest.mark.parametrize(("script", "effective_s", "lost", "ends"), [
    ("start 20; steps 5; save 2; look 7; steps 5; look 3; end finish stall_s=1", 100,
     {"start-up": 20, "checkpoint stall": 3, "validation and sampling": 10}, ["finished"]),
    # Killed within a step; locally, until somebody starts it again, nobody wanted it to run.
    *((KILLED.format(every), 200, {"start-up": 50, "recomputed steps": 40, "stopped": 503},
       ["ended without a record", "finished"]) for every in ("", "log_every=4")),
    # A rollback undoes steps, and the one that was judged.
    ("start 20; steps 15; roll_back 10 lost_s=16; steps 2; roll_back 10 lost_s=14; steps 10; end finish", 200,
     {"start-up": 20, "recomputed steps": 100}, ["finished"]),
    (f"{LAUNCHED}; wait 3000; launcher job job=8; launcher attempt job=8; start 23 step=14 job=8; steps 2; end finish",
     160, {"queue": 1000, "preflight": 17, "start-up": 108, "checkpoint stall": 2, "recomputed steps": 50, "hang": 610,
           "stopped": 3000, "other": 6},
     ["crashed: rank 1 was killed", "hung: rank 3 (n4) was late", "asked to stop (SIGTERM)", "finished"]),
    (QUEUED, 30, {"start-up": 20}, ["asked to stop (SIGUSR2)"]),
    # A node that is lost takes the launcher along: the next job's first word ends the wait.
    ("launcher job job=7; start 20 job=7; steps 3; wait 200; launcher job job=7; start 20 step=2 job=7; steps 1", 30,
     {"queue": 200, "start-up": 40, "recomputed steps": 10}, ["ended without a record", ""]),
    # Finished, and continued later with more steps: nobody was waiting.
    ("launcher attempt; start 20; steps 3; end finish; launcher ended status=done next=leave; wait 500; launcher "
     "attempt; start 20 step=3; steps 1; end finish", 40, {"start-up": 40, "stopped": 500}, ["finished", "finished"]),
    # A local hang is told by what its ranks wrote.
    ("start 20; steps 3; hang 60; wait 40; start 20 step=3; steps 1; end finish", 40,
     {"start-up": 40, "hang": 60, "stopped": 40}, ["hung", "finished"]),
    # Jobs before training was begun from scratch do not count.
    ("launcher job job=5; wait 9000; launcher job job=6; start 20 job=6; steps 1; end finish", 10, {"start-up": 20},
     ["finished"])])
def test_planted_times_are_found_again(run, script, effective_s, lost, ends):
    result = goodput(RunFacts(run.play(script).folder))
    assert (parts(result), result.effective_s) == (lost, effective_s) and not result.notes
    assert result.share == pytest.approx(effective_s / (effective_s + sum(lost.values())))
    assert [start.why for start in result.starts] == ends and result.started == first_start(RunFacts(run.folder))


def test_all_starts_count_as_run_time_and_nothing_between_them(run):
    facts = RunFacts(run.play("start 20; steps 3; wait 503; start 30 step=2; steps 1; end finish").folder)
    assert run_s(facts) == pytest.approx(20 + 30 + 30 + 10) and len(facts.training_starts) == 2


def test_clocks_that_differ_are_noted(run):
    run.play("start 20; steps 10").clock -= 60  # the next start is on a node whose clock is behind
    result = goodput(RunFacts(run.play("start 20 step=10; steps 2; end finish").folder))
    assert "clocks of nodes differ" in result.notes[0]
    parts(result)


def test_a_run_without_a_step_has_no_goodput(run):
    assert goodput(RunFacts(run.folder)) is None and first_start(RunFacts(run.folder)) is None
