"""A training job that cannot go on, or not on these nodes, says why."""

from __future__ import annotations

from pipeline.contract.manifest import read_manifest
from pipeline.contract.state import read_attempts
from pipeline.files import read_lines
from tests.slurm.faults import Training


def test_a_hang_is_named_and_starts_that_bring_nothing_end_with_the_reason(training):
    """Rank 1 hangs; started again, it crashes at the same step, before there is a checkpoint."""
    run: Training = training(faults="hang:rank=1,step=3; exit:rank=1,step=3,again=1",
                             train={"guards": {"hang_minutes": 0.3}}, launch={"max_restarts": 1})
    run.submit(stages="train,convert")
    run.wait_until_gone()
    hung, crashed = run.ends
    assert (hung.status, hung.next) == ("hung", "restart"), run.story()
    assert f"rank 1 ({run.starts[0]['nodes'][1]})" in hung.reason
    assert (crashed.status, crashed.next, crashed.restart) == ("crashed", "stop", 0)
    state = run.state
    assert state is not None and state.status == "failed"
    assert "2 starts in a row" in state.reason and "rank 1" in state.reason
    assert read_manifest(run.run / "convert") is None
    run.check_curve()


def test_a_node_that_fails_preflight_twice_is_left_out_of_the_next_submission(training):
    run: Training = training(launch={"preflight": True, "preflight_factor": 1000,
                                     "environment": {"DROVER_PREFLIGHT_FAULT": "n2:disk"}})
    run.submit()
    run.wait_until_gone()
    assert not run.starts
    state = run.state
    assert state is not None and "n2" in state.reason and "submit the same command again" in state.reason
    strikes = list(read_lines(run.run / "launch/nodes.jsonl"))
    assert [strike["node"] for strike in strikes] == ["n2", "n2"]
    assert all("disk" in strike["reason"] for strike in strikes)
    assert "left out  n2" in run.submit()
    assert "n2" not in run.next_start(0)["nodes"]
    assert [event["bad"].keys() for event in read_attempts(run.run) if event["event"] == "preflight"] == [
        {"n2"}, {"n2"}, set()]
