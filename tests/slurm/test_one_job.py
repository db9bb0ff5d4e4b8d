"""One job of a training, disturbed in many ways: it goes on by itself, and the losses are those of an undisturbed one.

The tests share the job: each waits until it trains, disturbs it, and leaves it when it has gone on or is about to. What
a lost node does, tests/slurm/test_chain.py shows.
"""

import os
import signal

import pytest

from drover.launch.slurm.scheduler import seconds
from drover.pipeline.contract.manifest import read_manifest
from drover.pipeline.core.files import read_lines
from tests.slurm.faults import EVERY, in_order, job_processes

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def job(shared_run):
    """The job, on two of the four nodes, and one of the next stage that waits for it."""
    shared_run.submit(stages="train,convert")
    return shared_run


@pytest.fixture
def run(job, request):
    yield from in_order(job, request)


def test_a_killed_rank_is_started_again_in_the_allocation(run):
    step, node = run.next_wait(), run.last["nodes"][1]
    os.kill(run.rank(1), signal.SIGKILL)
    end = run.next_end()
    assert (end.status, end.next, end.step) == ("crashed", "restart", step - 2)
    assert f"rank 1 on {node}: killed" in end.reason


def test_the_controller_is_away_while_a_rank_dies_and_is_restarted(run):
    run.next_wait()
    run.cluster.stop_controller()
    os.kill(run.rank(1), signal.SIGKILL)
    run.go_on()  # without a controller nobody tells rank 0 to end: it finds out by itself
    run.next_start()  # while there is nobody to make its step
    run.cluster.start_controller()
    run.next_wait()
    run.cluster.restart_controller()
    end = run.next_end()
    assert (end.status, end.next, end.restart) == ("crashed", "restart", run.last["restart"])
    run.go_on()


def test_a_killed_runner_takes_its_ranks_along_and_the_job_is_queued_again(run):
    run.next_wait()
    rank = run.rank(1)
    os.kill(run.process(), signal.SIGKILL)
    run.until(lambda: rank not in job_processes(run.cluster), "the end of the ranks")
    run.next_start(requeued=True)
    end = run.next_end()
    # Slurm asks the ranks to end before it kills them: fast ones have saved by then.
    assert end.status in ("crashed", "preempted") and "runner was killed" in end.reason


def test_preempted_the_ranks_save_and_the_job_is_queued_again(run):
    """Slurm ends the ranks with SIGTERM."""
    step = run.next_wait()
    run.cluster.run("scontrol", "requeue", run.job())
    end = run.next_end()
    assert end.status == "preempted" and end.step >= step - 1
    assert run.next_start(requeued=True)["from"] == end.step


def test_the_time_limit_is_a_request_to_save_and_queue_again_though_accounting_stops(run):
    """Slurm looks at the limits every half minute, and may warn up to half a minute before it was told to."""
    run.next_wait()
    job = run.job()
    run.cluster.stop_accounting()
    used = run.cluster.run("squeue", "--noheader", "--jobs", job, "--format=%M").stdout
    run.cluster.run("scontrol", "update", f"JobId={job}", f"TimeLimit={int(seconds(used.strip())) // 60 + 2}")
    end = run.next_end()
    run.cluster.run("scontrol", "update", f"JobId={job}", "TimeLimit=UNLIMITED")
    assert (end.status, end.next) == ("preempted", "requeue") and "SIGUSR2" in end.reason
    assert end.step is not None and end.step % EVERY and run.next_start(requeued=True)["from"] == end.step
    run.cluster.start_accounting()


def test_a_node_that_slurm_gave_up_runs_on_and_gives_way(run):
    """Only the first node's daemon dies: the old runner and a rank are still there when the job starts elsewhere."""
    run.next_wait()
    old, first = {run.process(), run.rank(0)}, run.last["nodes"][0]
    run.cluster.stop_daemon(f"slurmd-{first}")
    run.cluster.report_loss(first)
    assert first not in run.next_start(requeued=True)["nodes"]
    run.go_on()  # the old rank 0: nobody can tell it to end, and its partner is gone
    run.until(lambda: not old & job_processes(run.cluster), "the end of what ran on the lost node")
    run.next_wait()
    assert first in {failure["node"] for failure in read_lines(run.run / "launch/nodes.jsonl")}
    assert run.next_end().status == "crashed"
    run.go_on()


def test_after_all_that_the_curve_is_the_undisturbed_one_and_the_next_stage_is_done(run):
    run.finish()
    assert (run.ends[-1].job, run.ends[-1].status) == (run.job(), "done")
    assert read_manifest(run.run / "convert") is not None
