"""Which state a stage is in: by its folder, by Slurm's answers, by both."""

from __future__ import annotations

import pytest

from launch.run_status.run_files import read_run
from launch.run_status.run_status import wanted_ids
from launch.slurm.scheduler import JobInfo
from tests.launch.run_status.judged import DEPENDENTS, standing, states, text, training


@pytest.mark.parametrize("status, info, expected, said", [
    ("running", JobInfo("16", "RUNNING"), "running", ""),
    ("running", JobInfo("16", "RUNNING", restarts=1), "starting", ""),
    ("preempted", JobInfo("16", "COMPLETING"), "ending", ""),
    ("preempted", JobInfo("16", "PENDING", "BeginTime", restarts=1), "requeued", "after about two minutes"),
    ("preempted", JobInfo("16"), "stopped", "train was stopped after step 300: why"),
    ("running", JobInfo("16"), "gone", "its job 16 is not known to Slurm any more (crashed, or cancelled)"),
    ("running", JobInfo("16", "NODE_FAIL"), "gone", "its job 16 ended NODE_FAIL"),
    ("running", JobInfo("16", "CANCELLED"), "cancelled", "train was cancelled"),
    ("failed", JobInfo("16", "CANCELLED"), "failed", "train failed: why (after step 300)"),
    ("running", JobInfo("16", "PENDING", "launch failed requeued held"), "held", "`scontrol release 16`")])
def test_state_and_queue_together(run, status, info, expected, said):
    training(run)
    run.state("train", status, job="16", step=300, reason="why", again=True)
    jobs = {"16": info, **DEPENDENTS}
    assert states(run, jobs)["train"] == expected and said in text(run, jobs, 1000)


@pytest.mark.parametrize("info, expected, said", [
    (JobInfo("16", "PENDING", "Dependency"), "waiting", ""),
    (JobInfo("16", "PENDING", "Resources"), "queued", "train (job 16) waits for free nodes (Resources)"),
    (JobInfo("16", "PENDING", "QOSMaxJobsPerUserLimit"), "queued", "(QOSMaxJobsPerUserLimit)"),
    (JobInfo("16", "PENDING", "DependencyNeverSatisfied"), "stuck", "will never run"),
    (JobInfo("16", "RUNNING"), "starting", ""), (JobInfo("16", "CANCELLED"), "cancelled", "train was cancelled"),
    (JobInfo("16", "FAILED", "NonZeroExitCode"), "failed", "Slurm's job 16 ended FAILED (NonZeroExitCode)"),
    (JobInfo("16", "COMPLETED"), "failed", "has ended, but the stage has no manifest"),
    (JobInfo("16"), "gone", "it never began")])
def test_queue_alone(run, info, expected, said):
    run.submitted(*run.whole_chain())
    run.done("shard", "tokenizer", "encode", until=700)
    jobs = {"16": info, **DEPENDENTS}
    assert states(run, jobs)["train"] == expected and said in text(run, jobs, 1000)
    # What waits behind one that is stuck waits in vain, and so does who watches.
    assert standing(run, jobs).outcome == (None if expected in ("waiting", "queued", "starting") else "failed")
    assert expected != "stuck" or "submit.py --cancel runs/demo" in text(run, jobs, 1000)


def test_slurm_does_not_answer(run):
    training(run)
    seen = standing(run, None)
    assert [row.state for row in seen.rows] == ["done", "done", "done", "running?", *["submitted?"] * 3]
    assert seen.remarks[0].startswith("Slurm does not answer") and seen.outcome is None


def test_state_of_an_earlier_submission_is_no_news(run):
    training(run)
    run.state("train", "failed", job="5", seconds=5000, reason="long ago")
    jobs = {"16": JobInfo("16", "PENDING", "Resources"), **DEPENDENTS}
    assert states(run, jobs)["train"] == "queued" and "long ago" not in text(run, jobs)
    assert states(run, {"16": JobInfo("16"), **DEPENDENTS})["train"] == "gone"


def test_forced_rebuild_is_not_done_until_it_is(run):
    run.submitted(*run.whole_chain(), seconds=100)
    run.done("train", until=1000)
    jobs = {"16": JobInfo("16", "PENDING", "Dependency")}
    assert "16" in wanted_ids(read_run(run.folder)) and states(run, jobs)["train"] == "waiting"
    run.done("train", until=50)
    assert states(run, jobs)["train"] == "done"
