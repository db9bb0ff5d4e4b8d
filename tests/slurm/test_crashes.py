"""A training job that cannot go on says why."""

import pytest

from drover.pipeline.contract.manifest import read_manifest

pytestmark = pytest.mark.slow


def test_a_hang_is_named_and_starts_that_bring_nothing_end_with_the_reason(training):
    """Rank 1 hangs; started again, it crashes at the same step, before there is a checkpoint. The chain ends there."""
    run = training(faults="hang:rank=1,step=3; exit:rank=1,step=3,again=1",
                             train={"guards": {"hang_minutes": 0.3}}, launch={"max_restarts": 1})
    run.submit(stages="train,convert")
    run.wait_until_gone()
    hung, crashed = run.ends
    assert (hung.status, hung.next) == ("hung", "restart"), run.story()
    assert f"rank 1 ({run.starts[0]['nodes'][1]})" in hung.reason
    assert (crashed.status, crashed.next, run.state.status) == ("crashed", "stop", "failed")
    assert "2 starts in a row" in run.state.reason and "rank 1" in run.state.reason
    assert read_manifest(run.run / "convert") is None
    assert [run.cluster.state(run.job(stage)) for stage in ("train", "convert")] == ["FAILED", "CANCELLED"]
    run.check_curve()


def test_a_spare_node_replaces_one_that_fails_the_preflight(training):
    """In the same job, which is not queued again."""
    run = training(launch={"train": {"spare_nodes": 1}, "preflight": True, "health_check": [
        "sh", "-c", "test $SLURMD_NODENAME != n2 || { echo n2 is ill; exit 1; }"]})
    run.submit("launch.exclude=n[4-5]", stages="train,convert")
    run.next_wait()
    assert (run.last["nodes"], run.last["restart"]) == (["n1", "n3"], 0), run.story()
    assert "n2 failed preflight: n2 is ill (failure 1 within a day)" in run.log()
    run.finish()
    assert [run.cluster.state(run.job(stage)) for stage in ("train", "convert")] == ["COMPLETED"] * 2, run.story()
