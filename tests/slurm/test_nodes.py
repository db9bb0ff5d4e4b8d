"""Nodes of a training job are lost, come back, are found bad before the start, or are more or fewer next time."""

from __future__ import annotations

from pipeline.files import read_lines
from pipeline.state import read_attempts
from tests.slurm.faults import EVERY, Training, pause


def test_a_lost_node_is_named_and_the_job_goes_on_without_it(training):
    run: Training = training(faults=pause(11, seconds=60))
    run.submit()
    run.wait_for_pause(11)
    job = run.job()
    run.cluster.kill_node("n2")
    run.finish()
    run.cluster.start_node("n2")  # it is back, for whoever comes next
    first, last = run.ends
    assert first.step == EVERY and "n2" in first.reason
    assert (last.job, last.restart, last.status) == (job, 1, "done") and "n2" not in run.starts[-1]["nodes"]
    strikes = list(read_lines(run.run / "launch/nodes.jsonl"))
    assert [(strike["node"], strike["reason"][:9]) for strike in strikes] == [("n2", "went down")]


def test_a_node_that_slurm_gave_up_runs_on_and_gives_way(training):
    """Only the first node's daemon dies: the old runner and a rank are still there when the job starts elsewhere."""
    run: Training = training(faults=pause(11, seconds=40) + "; " + pause(20))
    run.cluster.needs("slurm", "the fake cluster's nodes have no daemons")
    run.submit()
    run.wait_for_pause(11)
    job, old = run.job(), {run.runner(), run.rank(0)}
    run.cluster.lab.daemons.stop("slurmd-n1")
    run.wait_for_pause(20)
    run.until(lambda: not old & run.processes(), "the end of what ran on the lost node")
    run.finish()
    assert [(end.job, end.restart, end.status) for end in run.ends] == [(job, 0, "crashed"), (job, 1, "done")]
    assert "n1" not in run.starts[-1]["nodes"]
    assert [strike["node"] for strike in read_lines(run.run / "launch/nodes.jsonl")] == ["n1"]


def test_all_nodes_lose_power_and_come_back(training):
    run: Training = training(faults=pause(11, seconds=60))
    run.submit()
    run.wait_for_pause(11)
    job = run.job()
    for node in run.cluster.nodes:
        run.cluster.kill_node(node)
    run.until(lambda: run.pending(job), "the job in the queue again")
    # Slurm may still be about to tell the job's old nodes that it is over there; a new start on them would hear it.
    first, second, *others = run.cluster.nodes
    for node in others:
        run.cluster.start_node(node)
    run.until(lambda: not run.pending(job), "the job on the nodes that are back")
    for node in (first, second):
        run.cluster.start_node(node)
    run.finish()
    assert (run.ends[-1].job, run.ends[-1].restart, run.ends[-1].status) == (job, 1, "done")


def test_a_node_that_fails_preflight_twice_is_left_out_of_the_next_submission(training):
    run: Training = training(launch={"preflight": True, "environment": {"DROVER_PREFLIGHT_FAULT": "n2:disk"}})
    run.submit()
    run.wait_until_gone()
    assert not run.starts
    state = run.state
    assert state is not None and "n2" in state.reason and "submit the same command again" in state.reason
    strikes = list(read_lines(run.run / "launch/nodes.jsonl"))
    assert [strike["node"] for strike in strikes] == ["n2", "n2"]
    assert all("disk" in strike["reason"] for strike in strikes)
    assert "left out  n2" in run.submit()
    run.finish()
    assert "n2" not in run.starts[-1]["nodes"]
    assert [event["bad"].keys() for event in read_attempts(run.run) if event["event"] == "preflight"] == [
        {"n2"}, {"n2"}, set()]


def test_four_nodes_then_two_then_four(training):
    run: Training = training(faults=pause(11, 21))
    run.submit(nodes=4)
    run.wait_for_pause(11)
    run.launcher("--stop", str(run.run))
    run.wait_until_gone()
    run.submit(nodes=2)
    run.wait_for_pause(21)
    run.launcher("--stop", str(run.run))
    run.wait_until_gone()
    run.submit(nodes=4)
    run.finish()
    assert [start["ranks"] for start in run.starts] == [4, 2, 4]
