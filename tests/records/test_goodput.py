"""Where the time went: planted figures are found again, every part in its place, and the parts are the whole."""

from __future__ import annotations

import math

import pytest

from drover.pipeline.records.goodput import CAUSES, first_start, goodput
from drover.pipeline.records.metrics import read_metrics
from tests.conftest import run_stage
from tests.records.recorded_time import BEGIN, Recorded
from tests.stages.training import curve, train_and_kill, train_folder


@pytest.fixture
def run(tmp_path):
    return Recorded(tmp_path)


def parts(found):
    """What was lost, by cause; the parts must be the whole."""
    assert math.isclose(found.effective_s + sum(found.lost.values()), found.wall_s, abs_tol=1e-6)
    assert list(found.lost) == list(CAUSES) and all(seconds >= 0 for seconds in found.lost.values())
    return {cause: round(seconds, 2) for cause, seconds in found.lost.items() if seconds > 0.01}


def test_a_run_that_nobody_disturbed(run):
    run.start(20)
    run.steps(5)
    run.save(2)
    run.look(7)
    run.steps(5)
    run.look(3)
    run.end("finish", stall_s=1)
    found = goodput(run.folder, now=BEGIN + 1e6)
    assert parts(found) == {"start-up": 20, "checkpoint stall": 3, "looking": 10}
    assert (found.effective_s, found.wall_s, found.share) == (100, 133, pytest.approx(100 / 133))
    assert found.begun == first_start(run.folder) == BEGIN


@pytest.mark.parametrize("log_every", [1, 4])
def test_what_was_killed_is_done_again(run, log_every):
    """Locally: until somebody starts it again, nobody wanted it to run."""
    run.start(20)
    run.steps(8, log_every)
    run.save(0)
    run.steps(4, log_every)
    run.wait(3)  # killed within a step
    run.wait(500)
    run.start(30, step=8)
    run.steps(12, log_every)
    run.end("finish")
    found = goodput(run.folder)
    assert parts(found) == {"start-up": 50, "recomputed steps": 40, "stopped": 503}
    assert found.effective_s == 200
    assert [(start.first, start.last, start.why) for start in found.starts] == \
        [(0, 12, "ended without a word"), (8, 20, "finished")]


def test_a_rollback_undoes_steps_and_the_one_that_was_judged(run):
    run.start(20)
    run.steps(15)
    run.roll_back(10, lost_s=16)
    run.steps(2)
    run.roll_back(10, lost_s=14)
    run.steps(10)
    run.end("finish")
    found = goodput(run.folder)
    assert parts(found) == {"start-up": 20, "recomputed steps": 50 + 16 + 20 + 14} and found.effective_s == 200


def launched(run):
    """On Slurm: preflight, a crash and a restart inside the allocation, a hang, a requeue, a stop for good, a second
    submission that ends in the queue's favour."""
    run.launcher("job", job="7")
    run.wait(1)
    run.wait(8)
    run.launcher("preflight", job="7", seconds=8.0)
    run.wait(2)
    run.launcher("attempt", job="7")
    run.start(20, job="7")
    run.steps(6)
    run.wait(5)  # killed within a step, noticed after 5 s
    run.launcher("ended", job="7", status="crashed", reason="rank 1 was killed", next="restart")
    run.wait(4)
    run.launcher("attempt", job="7")
    run.start(21, step=4, job="7")
    run.steps(3)
    run.hang(600, key="7.0.2")
    run.wait(10)
    run.launcher("ended", job="7", status="hung", reason="rank 3 (n4) was late", next="restart")
    run.launcher("attempt", job="7")
    run.wait(15)  # crashes before its first step
    run.launcher("ended", job="7", status="crashed", reason="exit", next="requeue")
    run.wait(1000)
    run.launcher("job", job="7")
    run.wait(9)
    run.launcher("preflight", job="7", seconds=9.0)
    run.launcher("attempt", job="7")
    run.start(22, step=4, job="7")
    run.steps(10)
    run.end("stop", stall_s=2, reason="SIGTERM")
    run.wait(1)
    run.launcher("ended", job="7", status="preempted", reason="SIGTERM", next="stop")


def test_the_launcher_knows_what_training_does_not(run):
    launched(run)
    run.wait(3000)
    run.launcher("job", job="8")
    run.launcher("attempt", job="8")
    run.start(23, step=14, job="8")
    run.steps(2)
    run.end("finish")
    found = goodput(run.folder)
    assert found.effective_s == 160 and not found.notes
    assert parts(found) == {
        "queue": 1000,
        "preflight": 17, "start-up": 1 + 2 + 20 + 4 + 21 + 15 + 22 + 23, "checkpoint stall": 2,
        "recomputed steps": 20 + 30, "hang": 610, "stopped": 3000, "other": 6}
    assert [start.why for start in found.starts] == \
        ["crashed: rank 1 was killed", "hung: rank 3 (n4) was late", "asked to stop (SIGTERM)", "finished"]


def test_a_run_that_waits_in_the_queue_loses_time_now(run):
    run.launcher("job", job="7")
    run.launcher("attempt", job="7")
    run.start(20, job="7")
    run.steps(3)
    run.end("stop", reason="SIGUSR2")
    run.launcher("ended", job="7", status="preempted", reason="SIGUSR2", next="requeue")
    assert parts(goodput(run.folder)) == {"start-up": 20}
    assert parts(goodput(run.folder, now=BEGIN + run.clock + 50)) == {"start-up": 20, "queue": 50}


def test_a_lost_node_takes_the_launcher_along(run):
    """No word of an end: the next job's first word ends the wait."""
    run.launcher("job", job="7")
    run.start(20, job="7")
    run.steps(3)
    run.wait(200)
    run.launcher("job", job="7")
    run.start(20, step=2, job="7")
    run.steps(1)
    assert parts(goodput(run.folder)) == {"queue": 200, "start-up": 40, "recomputed steps": 10}


def test_a_local_hang_is_told_by_what_its_ranks_wrote(run):
    run.start(20)
    run.steps(3)
    run.hang(60)
    run.wait(40)
    run.start(20, step=3)
    run.steps(1)
    run.end("finish")
    assert parts(goodput(run.folder)) == {"start-up": 40, "hang": 60, "stopped": 40}


def test_jobs_before_training_was_begun_afresh_do_not_count(run):
    run.launcher("job", job="5")
    run.wait(9000)
    run.launcher("job", job="6")
    run.start(20, job="6")
    run.steps(1)
    run.end("finish")
    assert goodput(run.folder).wall_s == 30 and first_start(run.folder) == BEGIN + 9000


def test_clocks_that_differ_are_told(run):
    run.start(20)
    run.steps(10)
    run.clock -= 60  # the next start is on a node whose clock is behind
    run.start(20, step=10)
    run.steps(2)
    run.end("finish")
    found = goodput(run.folder)
    assert "clocks of nodes differ" in found.notes[0]
    parts(found)


def test_nothing_to_tell(run):
    assert goodput(run.folder) is None and first_start(run.folder) is None
    run.event("start", step=0, ranks=1)  # as earlier versions wrote it
    assert goodput(run.folder) is None


@pytest.mark.slow
def test_a_real_run_that_was_killed(fresh):
    settings = ["train.steps=40", "train.checkpoint.every_steps=10", "train.checkpoint.background=false"]
    train_and_kill(fresh, *settings, ranks=1, after_step=17)
    before = curve(fresh)[-1]["step"]
    run_stage("train", fresh, *settings)
    found, metrics = goodput(train_folder(fresh).parent), read_metrics(train_folder(fresh) / "metrics.jsonl")
    assert parts(found).keys() >= {"recomputed steps", "start-up", "looking"}
    assert [(start.last, start.why) for start in found.starts] == [(before, "ended without a word"), (40, "finished")]
    assert found.starts[1].first == before // 10 * 10 and metrics[-1]["train_s"] == found.effective_s
    assert found.effective_s == pytest.approx(sum(record["step_s"] for record in metrics), abs=1e-3)
    assert metrics[-1]["goodput"] == pytest.approx(found.share, rel=0.3)
