"""One job of a training, disturbed in many ways: it goes on by itself, and the losses are those of an undisturbed one.

The tests share the job: each waits until it trains, disturbs it, and leaves it when it has gone on or is about to. What
a lost node does, tests/slurm/test_chain.py shows.
"""

import os
import signal

import pytest

from drover.pipeline.contract.manifest import read_manifest
from drover.pipeline.core.files import read_lines
from tests.slurm.faults import EVERY, in_order

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
    os.kill(run.runner(), signal.SIGKILL)
    run.until(lambda: rank not in run.processes(), "the end of the ranks")
    run.requeued()
    end = run.next_end()
    # Slurm asks the ranks to end before it kills them: fast ones have saved by then.
    assert end.status in ("crashed", "preempted") and "runner was killed" in end.reason


def test_queued_again_from_outside_while_the_newest_checkpoint_rots(run):
    """Slurm ends the ranks with SIGTERM: they save. What they saved is damaged before the job starts again."""
    run.next_wait()
    job = run.job()
    run.ask("scontrol", "requeuehold", job)
    run.next(lambda: run.pending(job) and not run.processes(), "the job in the queue again")
    before, newest = run.saved()[-2:]
    data = bytearray((newest / "rank-00001.safetensors").read_bytes())
    data[len(data) // 2] ^= 4
    (newest / "rank-00001.safetensors").write_bytes(data)
    run.ask("scontrol", "release", job)
    end = run.next_end()
    assert (end.status, f"step-{end.step:08}") == ("preempted", newest.name)
    run.requeued()
    run.next_wait()
    assert newest.name in run.output() and f"from {before.name}" in run.output()
    run.go_on()


def test_the_time_limit_is_a_request_to_save_and_queue_again_though_accounting_stops(run):
    """Slurm looks at the limits every half minute, and may warn up to half a minute before it was told to."""
    run.next_wait()
    job = run.job()
    run.cluster.stop_accounting()
    used = run.ask("squeue", "--noheader", "--jobs", job, "--format=%M").split(":")
    minutes = sum(int(part) * 60 ** place for place, part in enumerate(reversed(used))) // 60
    run.ask("scontrol", "update", f"JobId={job}", f"TimeLimit={minutes + 2}")
    end = run.next_end()
    run.ask("scontrol", "update", f"JobId={job}", "TimeLimit=UNLIMITED")
    assert (end.status, end.next) == ("preempted", "requeue") and "SIGUSR2" in end.reason
    assert end.step is not None and end.step % EVERY and run.requeued()["from"] == end.step
    run.cluster.start_accounting()


def test_all_nodes_lose_power_and_come_back(run):
    run.next_wait()
    job, old = run.job(), run.last["nodes"]
    # The job's own nodes last: else Slurm starts it on the others before they are lost, and holds it when that fails.
    for node in sorted(run.cluster.nodes, key=lambda node: node in old):
        run.cluster.kill_node(node)
    run.next(lambda: run.pending(job), "the job in the queue again")
    # Slurm may still be about to tell the job's old nodes that it is over there; a new start on them would hear it.
    for node in sorted(run.cluster.nodes, key=lambda node: node in old):
        if node in old:
            run.next(lambda: not run.pending(job), "the job on the nodes that are back")
        run.cluster.start_node(node)
    run.requeued()
    run.next_end()


def test_a_node_that_slurm_gave_up_runs_on_and_gives_way(run):
    """Only the first node's daemon dies: the old runner and a rank are still there when the job starts elsewhere."""
    run.next_wait()
    old, first = {run.runner(), run.rank(0)}, run.last["nodes"][0]
    run.cluster.stop_daemon(f"slurmd-{first}")
    run.cluster.report_loss(first)
    assert first not in run.requeued()["nodes"]
    run.go_on()  # the old rank 0: nobody can tell it to end, and its partner is gone
    run.until(lambda: not old & run.processes(), "the end of what ran on the lost node")
    run.next_wait()
    assert first in {failure["node"] for failure in read_lines(run.run / "launch/nodes.jsonl")}
    assert run.next_end().status == "crashed"
    run.go_on()


def test_after_all_that_the_curve_is_the_undisturbed_one_and_the_next_stage_is_done(run):
    run.finish()
    assert (run.ends[-1].job, run.ends[-1].status) == (run.job(), "done")
    assert read_manifest(run.run / "convert") is not None
