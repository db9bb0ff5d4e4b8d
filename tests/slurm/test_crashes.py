"""Processes of a training job die, hang or starve: it starts again inside its allocation, or says why it cannot."""

from __future__ import annotations

import os
import signal

from tests.slurm.faults import EVERY, Training, pause


def test_a_killed_rank_is_started_again_in_the_allocation_and_so_is_srun(training):
    run: Training = training(faults=pause(11, 20))
    run.submit()
    run.wait_for_pause(11)
    os.kill(run.rank(1), signal.SIGKILL)
    run.wait_for_pause(20)
    os.kill(run.srun(), signal.SIGKILL)
    run.finish()
    first, second, last = run.ends
    assert (first.status, first.next, first.step) == ("crashed", "restart", EVERY)
    assert "rank 1 on n2: killed" in first.reason
    assert (second.status, second.next, second.step) == ("crashed", "restart", 2 * EVERY)
    assert (last.status, last.start, last.restart, last.job) == ("done", 2, 0, run.job())


def test_a_killed_runner_takes_its_ranks_along_and_the_job_is_queued_again(training):
    run: Training = training(faults=pause(11))
    run.submit()
    run.wait_for_pause(11)
    job, rank = run.job(), run.rank(1)
    os.kill(run.runner(), signal.SIGKILL)
    run.until(lambda: run.pending(job), "the job in the queue again")
    run.until(lambda: rank not in run.processes(), "the end of the ranks")
    run.finish()
    assert (run.ends[-1].job, run.ends[-1].restart, run.ends[-1].status) == (job, 1, "done")


def test_the_controller_is_away_while_a_rank_dies_and_is_restarted(training):
    run: Training = training(faults=pause(11, 20))
    run.submit()
    run.wait_for_pause(11)
    run.cluster.stop_controller()
    os.kill(run.rank(1), signal.SIGKILL)
    run.until(lambda: len(run.starts) == 2, "the second start, while there is nobody to make its step")
    run.cluster.start_controller()
    run.wait_for_pause(20)
    run.cluster.restart_controller()
    run.finish()
    assert [(end.status, end.restart) for end in run.ends] == [("crashed", 0), ("done", 0)]


def test_accounting_stops_and_nothing_else_does(training_elsewhere):
    run: Training = training_elsewhere({"accounting": True}, faults=pause(11))
    run.submit()
    run.wait_for_pause(11)
    run.cluster.stop_accounting()
    run.ask("scancel", "--signal=USR2", run.job())
    run.finish()
    assert [(end.status, end.restart) for end in run.ends] == [("preempted", 0), ("done", 1)]


def test_a_rank_that_hangs_is_named_and_all_start_again(training):
    run: Training = training(faults="hang:rank=1,step=11", train={"guards": {"hang_minutes": 0.05}})
    run.submit()
    run.finish()
    first, last = run.ends
    assert (first.status, first.next) == ("hung", "restart") and "rank 1 (n2)" in first.reason
    assert (last.status, last.restart) == ("done", 0)


def test_starts_that_bring_nothing_end_with_the_reason(training):
    run: Training = training(faults="exit:rank=1,step=3,again=1", launch={"max_restarts": 1})
    run.submit(stages="train,convert")
    run.wait_until_gone()
    state = run.state
    assert state is not None and state.status == "failed"
    assert "2 starts in a row" in state.reason and "rank 1" in state.reason
    assert [end.next for end in run.ends] == ["restart", "stop"]
    run.check_curve()
