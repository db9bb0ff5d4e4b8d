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
from drover.launch.slurm.nodes import add_strike
from drover.launch.slurm.scheduler import COLUMNS
from drover.pipeline.contract.stages import STAGES
from drover.pipeline.core.files import write_text
from tests.launch.run_folders import SETTINGS
from tests.launch.run_status.conftest import DEPENDENTS, Seen
from tests.launch.slurm.test_wait_reasons import DOWN
from tests.refusal import table


@pytest.mark.parametrize("said, answer, state, remark", table(r"""
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
    null -> FAILED NonZeroExitCode -> failed -> job 16 ended FAILED \(NonZeroExitCode\)\. Logs: .*slurm/16.log
    null -> COMPLETED -> failed -> job 16 ended COMPLETED
    null -> CANCELLED -> failed -> job 16 ended CANCELLED
    running -> null -> running -> ^Slurm does not answer
    preempted -> null -> stopped -> ^Slurm does not answer
    failed -> null -> failed -> ^Slurm does not answer
    null -> null -> waiting -> ^Slurm does not answer""", yaml.safe_load, yaml.safe_load))
def test_its_word_and_the_queue(run, said, answer, state, remark):
    seen = run.training(said, step=300, reason="why").status(answer and {"16": answer, **DEPENDENTS})
    assert [row.state for row in seen.rows] == [*["done"] * 3, state, *["waiting"] * 3]
    assert re.search(remark, " ".join(seen.remarks))
    # What waits behind one that failed waits in vain, and so does who watches.
    assert seen.outcome == ("failed" if state == "failed" else None)


@pytest.mark.parametrize("nodes, offered", [(4, True), (1, False)])
def test_a_job_that_could_have_fewer_nodes(run, nodes, offered):
    """As much of the reason as the column of squeue holds."""
    write_text(run.folder / "config.yaml", f"launch: {{train: {{nodes: {nodes}}}}}")
    run.submitted(run.job("16", "train"))
    said, = run.status({"16": f"PENDING {DOWN[:dict(COLUMNS)['Reason']]}"}).remarks
    assert said.startswith("train (job 16) waits for nodes that are down") and ("fewer --nodes" in said) == offered


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
    assert run.states({})[3] == "failed" and "no longer exists; it was killed. Logs: " in run.status({}).remarks[0]
    for seconds, then, state in (30, "restart", "running"), (20, "stop", "failed"):
        run.attempt("ended", "train", "local", seconds=seconds, status="crashed", reason="rank 1: killed", next=then)
        assert run.states({})[3] == state
    assert wanted_ids(read_run(run.folder)) == []
    write_text(run.folder / ".locks/train", "process 1 on another-machine, since then\n")
    assert run.status({}).rows[3].remarks[0].endswith("its last record is 10 m 00 s old")


@pytest.mark.parametrize("read, sort, rest, job, progress, remark", table("""
    RUNNING -> PENDING -> PENDING -> 20 -> read 1/2 parts 50% -> ''
    FAILED -> CANCELLED -> CANCELLED -> 20 -> read 1/2 parts 50%, failed: 1 -> 'shard failed: element 1 of read ended \
FAILED. Logs: runs/demo/logs/shard/20_1.*, runs/demo/logs/slurm/20_1.log'
    COMPLETED -> COMPLETED -> RUNNING -> 22 -> read 1/2 parts 50% -> ''""", *[str] * 5, yaml.safe_load))
def test_arrays_of_several_phases(run, read, sort, rest, job, progress, remark):
    run.submitted(run.job("20", "shard", "array", (0, 1), parts=2, phase="read"),
                  run.job("21", "shard", "array", (0, 1), parts=2, phase="sort"), run.job("22", "shard", "finalise"))
    run.part("shard", "read", 0, 2)
    answers = {"20": read, "20_0": "COMPLETED", "20_1": read if remark else "RUNNING", "21": sort, "22": rest}
    seen = run.status(answers)
    assert (seen.rows[0].job, seen.rows[0].progress) == (job, progress) and remark in " ".join(seen.remarks)
    run.progress("shard", 1, 4, "shards", phase="write")  # by a job that is no array
    assert run.status(answers).rows[0].progress == (progress if job == "20" else "write 1/4 shards 25%")


def test_why_elements_of_an_array_and_a_job_failed(run):
    """As the launcher recorded it: of elements that failed alike once. A job that was ended from outside left none."""
    run.submitted(run.job("20", "encode", "array", (0, 1, 2, 3), parts=4, phase="encode"), run.job("30", "convert"))
    for element, reason in (0, "element 0 was done before"), (1, "no space"), (2, "no space"):
        run.attempt("ended", "encode", f"20_{element}", status="failed", reason=reason)
    run.attempt("ended", "convert", "30", status="crashed", reason="killed by SIGKILL")
    run.part("encode", "encode", 0, 4)
    seen = run.status({"20": "FAILED", "30": "FAILED", **{f"20_{element}": "FAILED" for element in range(1, 4)}})
    assert seen.rows[2].remarks[0].startswith(
        "encode failed: elements 1-2 of encode ended FAILED: no space; element 3 of encode ended FAILED. Logs: ")
    assert "convert failed: job 30 ended FAILED (no reason given): killed by SIGKILL. Logs: " in " ".join(seen.remarks)


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
        add_strike(run.folder, "n3", f"16.{number}", "was late")
    run.done("shard", "tokenizer", "encode", until=1)
    asked, strike = run.status({"16": "RUNNING", **DEPENDENTS}).remarks
    assert asked == "a request to stop training is pending (maintenance): it saves and ends"
    assert re.fullmatch("node n3 failed at .*: was late; it is excluded from the next submission", strike)
