"""Which state a stage is in, and what is said of it: by its folder, by Slurm's answers, by both."""

import platform
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from drover.launch.run_status.run_files import read_run
from drover.launch.run_status.run_status import wanted_ids
from drover.launch.slurm.nodes import record_failure
from drover.launch.slurm.scheduler import COLUMNS
from drover.pipeline.contract.stages import STAGES
from drover.pipeline.core.files import write_text
from tests.launch.run_folders import SETTINGS
from tests.launch.run_status.conftest import DEPENDENTS, Seen
from tests.launch.slurm.test_wait_reasons import DOWN
from tests.refusal import table


@pytest.mark.parametrize("message, answer, state, remark", table(r"""
    preempted -> PENDING BeginTime -> waiting -> after about two minutes
    preempted -> COMPLETING -> running -> ^$
    null -> RUNNING -> running -> ^$
    running -> PENDING launch failed requeued held -> waiting -> `scontrol release 16`
    null -> PENDING Dependency -> waiting -> ^$
    null -> PENDING QOSMaxJobsPerUserLimit -> waiting -> your jobs
    null -> PENDING Resources -> waiting -> train \(job 16\) waits for free nodes \(Resources\)
    null -> PENDING DependencyNeverSatisfied -> failed -> will never run.* remove it first: drover cancel runs/demo
    preempted -> unknown -> stopped -> train stopped after step 300: why
    failed -> CANCELLED -> failed -> train failed after step 300: why.*to continue: python launch/submit.py
    running -> unknown -> failed -> train failed: job 16 is no longer known to Slurm: it crashed or was
    running -> NODE_FAIL -> failed -> train failed: job 16 ended NODE_FAIL
    null -> unknown -> failed -> known
    null -> FAILED NonZeroExitCode -> failed -> job 16 ended FAILED \(NonZeroExitCode\)\. .drover why runs/demo
    null -> COMPLETED -> failed -> job 16 ended COMPLETED
    null -> CANCELLED -> failed -> job 16 ended CANCELLED
    running -> null -> running -> ^Slurm does not answer
    preempted -> null -> stopped -> ^Slurm does not answer
    failed -> null -> failed -> ^Slurm does not answer
    null -> null -> waiting -> ^Slurm does not answer""", yaml.safe_load, yaml.safe_load))
def test_its_word_and_the_queue(run, message, answer, state, remark):
    seen = run.training(message, step=300, reason="why").status(answer and {"16": answer, **DEPENDENTS})
    assert [row.state for row in seen.rows] == [*["done"] * 3, state, *["waiting"] * 3]
    assert re.search(remark, " ".join(seen.remarks))
    # What waits behind one that failed waits in vain, and so does who watches.
    assert seen.outcome == ("failed" if state == "failed" else None)


@pytest.mark.parametrize("nodes, offered", [(4, True), (1, False)])
def test_a_job_that_could_have_fewer_nodes(run, nodes, offered):
    """As much of the reason as the column of squeue holds."""
    write_text(run.folder / "config.yaml", f"launch: {{train: {{nodes: {nodes}}}}}")
    run.submitted(run.job("16", "train"))
    remark, = run.status({"16": f"PENDING {DOWN[:dict(COLUMNS)['Reason']]}"}).remarks
    assert remark.startswith("train (job 16) waits for nodes that are down") and ("fewer --nodes" in remark) == offered


def test_a_submission_that_sbatch_refused_halfway_is_not_done(run):
    job = run.job("16", "train")
    run.done("train", until=10)
    for jobs, refused, why in (([], "No such account.", "No such account."),
                               ([job], "", "it is at work, or was killed")):
        run.submitted(*jobs, planned=2, refused=refused)
        seen = run.status({})
        assert seen.outcome == "failed"
        assert seen.remarks[-2] == f"not all jobs of the newest submission are queued: {why}"
    run.submitted(job, planned=1)
    assert run.status({}).outcome == "done"
    run.submitted(job, planned=2)
    run.done(*STAGES, until=10)
    seen = run.status({})
    assert seen.outcome == "done" and not seen.remarks, "the other stages were made without Slurm"


def test_a_word_or_a_manifest_of_an_earlier_submission_is_no_news(run):
    run.training("failed", seconds=5000)
    assert run.states({"16": "PENDING Dependency"})[3] == "waiting" and run.states({"16": "RUNNING"})[3] == "running"
    run.done("train", until=1000)  # it is forced
    assert "16" in wanted_ids(read_run(run.folder)) and run.states({"16": "PENDING Dependency"})[3] == "waiting"
    run.done("train", until=50)
    assert "16" not in wanted_ids(read_run(run.folder)) and run.states({"16": "COMPLETING"})[3] == "done"


def test_local_run(run):
    """Of a process that runs, is gone, cannot be seen; with and without a word of the stage."""
    run.begun("train")
    with subprocess.Popen([sys.executable, "-c", "input()", "-m", "drover.pipeline.train"],
                          stdin=subprocess.PIPE) as process:
        write_text(run.folder / ".locks/train", f"process {process.pid} on {platform.node()}, since then\n")
        assert run.states({})[2:5] == ["to do", "running", "to do"]
        process.communicate(b"\n")
    assert run.states({})[3] == "stopped"
    run.state("train", "running")
    assert run.states({})[3] == "failed" and "no longer exists; it was killed. `drover why" in run.status({}).remarks[0]
    run.attempt("attempt", "train", "local", ranks=2, nodes=["n1"])
    for seconds, then, state in (30, "restart", "running"), (20, "stop", "failed"):
        run.attempt("ended", "train", "local", seconds=seconds, status="crashed", reason="rank 1: killed", next=then)
        assert run.states({})[3] == state
    assert wanted_ids(read_run(run.folder)) == []
    write_text(run.folder / ".locks/train", "process 1 on another-machine, since then\n")
    assert run.status({}).rows[3].remarks[0].endswith("its last record is 10 m 00 s old")


def test_why_an_array_and_a_job_failed(run):
    """As the launcher recorded it. A job that was ended by others left no record."""
    run.submitted(run.job("20", "encode", (0, 1)), run.job("30", "convert"))
    for stage, job, reason in (("encode", "20_1", "no space"), ("convert", "30", "killed by SIGKILL")):
        run.attempt("attempt", stage, job, ranks=1, nodes=["n1"])
        run.attempt("ended", stage, job, status="failed", reason=reason)
    remarks = run.status({"20": "FAILED", "30": "FAILED"}).remarks
    assert remarks[0].startswith("encode failed: job 20 ended FAILED (no reason given): no space. `drover why")
    assert "convert failed: job 30 ended FAILED (no reason given): killed by SIGKILL. " in remarks[1]


def test_a_reused_stage_and_one_of_a_plugin(run):
    run.done("shard", "tokenizer")
    other = Seen(Path("runs/other"), {**SETTINGS, "reuse": "runs/demo"})
    other.done("letters")
    assert other.states({}) == ["reused", "reused", *["to do"] * 5, "done"]


@pytest.mark.parametrize("path, content, remark", table("""
    train/STATE.json -> {"status": "ru -> ''
    .locks/train -> process -> ''
    launch/chain.json -> {"jo -> ''
    train/manifest.json -> {"format": 99} -> by another version
    train/manifest.json -> { -> is damaged""", str, str, yaml.safe_load))
def test_files_that_are_torn_or_foreign(run, path, content, remark):
    write_text(run.training().folder / path, content)
    seen = run.status({"16": "RUNNING", **DEPENDENTS})
    assert seen.rows[3].state == ("failed" if remark else "running") and remark in " ".join(seen.remarks)


def test_failed_nodes_and_a_request_to_stop(run):
    run.submitted(*run.whole_chain())
    run.state("train", "running", job="16")
    write_text(run.folder / "launch/stop", "maintenance\n")
    for number in range(2):
        record_failure(run.folder, "n3", f"16.{number}", "was late")
    run.done("shard", "tokenizer", "encode", until=1)
    assert run.status({"16": "RUNNING", **DEPENDENTS}).remarks == [
        "a request to stop training is pending (maintenance): it saves and ends",
        "excluded from the next submission, since they failed twice within a day: n3"]
