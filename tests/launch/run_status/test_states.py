"""Which state a stage is in, and what is said of it: by its folder, by Slurm's answers, by both."""

from __future__ import annotations

import platform
import re
import subprocess
import sys
from pathlib import Path

import pytest

from launch.run_status.run_files import read_run
from launch.run_status.run_status import wanted_ids
from launch.slurm.nodes import add_strike
from launch.slurm.scheduler import JobInfo
from pipeline.files import write_json, write_text
from tests.launch.run_folders import SETTINGS, ago
from tests.launch.run_status.conftest import DEPENDENTS, Seen


@pytest.mark.parametrize("said, answer, state, remark", [
    ("running", "RUNNING", "running", ""), ("preempted", "COMPLETING", "running", ""), ("", "RUNNING", "running", ""),
    ("preempted", JobInfo("16", "PENDING", "BeginTime", restarts=1), "waiting", "after about two minutes"),
    ("running", "PENDING launch failed requeued held", "waiting", "`scontrol release 16`"),
    ("", "PENDING Dependency", "waiting", ""), ("", "PENDING QOSMaxJobsPerUserLimit", "waiting", "your jobs use all"),
    ("", "PENDING Resources", "waiting", r"train \(job 16\) waits for free nodes \(Resources\)"),
    ("", "PENDING DependencyNeverSatisfied", "failed", "will never run.* go first: .* --cancel runs/demo"),
    ("preempted", "unknown", "stopped", "train stopped after step 300: why"),
    ("failed", "CANCELLED", "failed", "train failed after step 300: why"),
    ("running", "unknown", "failed", "train failed: job 16 is not known to Slurm any more: it crashed, or was"),
    ("running", "NODE_FAIL", "failed", "train failed: job 16 ended NODE_FAIL"),
    ("running", "CANCELLED", "failed", "train failed: job 16 was cancelled"),
    ("", "CANCELLED", "failed", "train failed: before it began, job 16 was cancelled"),
    ("", "unknown", "failed", "before it began, job 16 is not known"),
    ("", "FAILED NonZeroExitCode", "failed", r"job 16 ended FAILED \(NonZeroExitCode\)\. Logs: .*slurm/16.log"),
    ("", "COMPLETED", "failed", "job 16 has ended, but the stage is not done")])
def test_its_word_and_the_queue(run, said, answer, state, remark):
    seen = run.training(said, step=300, reason="why").status({"16": answer, **DEPENDENTS})
    assert [row.state for row in seen.rows] == [*["done"] * 3, state, *["waiting"] * 3]
    assert re.search(remark, " ".join(seen.remarks)) and (seen.remarks == []) == (remark == "")
    # What waits behind one that failed waits in vain, and so does who watches.
    assert seen.outcome == ("failed" if state == "failed" else None)


@pytest.mark.parametrize("said, state, others", [
    ("running", "running", "waiting"), ("preempted", "stopped", "waiting"), ("failed", "failed", "waiting"),
    ("", "waiting", "waiting")])
def test_slurm_does_not_answer(run, said, state, others):
    seen = run.training(said).status(None)
    assert [row.state for row in seen.rows] == [*["done"] * 3, state, *[others] * 3]
    assert seen.remarks[0].startswith("Slurm does not answer") and (seen.outcome is None) == (said != "failed")


def test_an_earlier_submission_is_no_news(run):
    run.training("failed", seconds=5000, reason="long ago")
    run.state("train", "failed", job="5", seconds=5000, reason="long ago")
    for answer, state in (("PENDING Resources", "waiting"), ("unknown", "failed")):
        assert run.row({"16": answer}).state == state and "long ago" not in run.text({"16": answer})


def test_a_forced_rebuild_is_not_done_until_it_is(run):
    run.submitted(*run.whole_chain(), seconds=100)
    for until, state in ((1000, "waiting"), (50, "done")):
        run.done("train", until=until)
        assert ("16" in wanted_ids(read_run(run.folder))) == (state == "waiting")
        assert run.row({"16": "PENDING Dependency"}).state == state


def test_local_run(run):
    """Of a process that runs, is gone, cannot be seen; with and without a word of the stage."""
    run.done("shard", "tokenizer", "encode")
    run.begun("train")

    def states(holder):
        write_text(run.folder / ".locks/train", f"process {holder}, since {ago(600)}\n")
        return [row.state for row in run.status({}).rows[2:5]]

    with subprocess.Popen([sys.executable, "-c", "input()", "-m", "pipeline.train"], stdin=subprocess.PIPE) as process:
        assert states(f"{process.pid} on {platform.node()}") == ["done", "running", "to do"]
        process.communicate(b"\n")
    gone = f"{process.pid} on {platform.node()}"
    assert states(gone) == ["done", "stopped", "to do"]
    run.state("train", "running")
    assert states(gone) == ["done", "failed", "to do"] and "is gone; it was killed" in run.text({})
    assert states("1 on another-machine") == ["done", "running", "to do"]
    assert "unseen from here; its last record is 10 m 00 s old" in run.text({})
    assert wanted_ids(read_run(run.folder)) == []


def test_links_of_training(run):
    run.submitted(*(run.job(id, "train", "link") for id in ("21", "22", "23")))
    run.state("train", "preempted", job="21", again=True)
    row = run.row({"21": "COMPLETED", "22": JobInfo("22", "RUNNING", elapsed_s=5), "23": "PENDING Dependency"})
    assert (row.job, row.state, row.elapsed) == ("22 (2/3)", "running", "5.0 s")


@pytest.mark.parametrize("answers, shares, job, progress, remark", [
    ({"20": "COMPLETED", "21": "RUNNING"}, "01 1 ", "21", "sort 1/2 parts 50%", ""),
    ({"20": "COMPLETED", "21": "FAILED", "21_0": "FAILED", "21_1": "COMPLETED", "22": "CANCELLED", "23": "CANCELLED"}, "01 1 ", "21",
     "sort 1/2 parts 50%, 1 failed (0)", "shard failed: element 0 of sort ended FAILED. Logs: runs/demo/logs/shard/21_0.*"),
    (dict.fromkeys(("20", "21", "22"), "COMPLETED") | {"23": "RUNNING"}, "01 01 01", "23", "write 2/2 parts 100%", "")])
def test_arrays_of_several_phases(run, answers, shares, job, progress, remark):
    arrays = [run.job(id, "shard", "array", (0, 1), (), parts=2, name=f"demo-shard-{phase}", phase=phase)
              for id, phase in (("20", "read"), ("21", "sort"), ("22", "write"))]
    run.submitted(*arrays, run.job("23", "shard", "finalise"))
    run.begun("shard")
    for array, done in zip(arrays, shares.split(" "), strict=True):
        for index in done:
            run.part("shard", array.phase, int(index), 2)
    row = run.row({"22": "PENDING Dependency", "23": "PENDING Dependency", **answers}, "shard")
    assert (row.job, row.progress) == (job, progress) and row.state == ("failed" if remark else "running")
    assert remark in run.text(answers)


def test_a_reused_stage_and_one_of_a_plugin(run):
    run.done("shard", "tokenizer", "encode")
    other = Seen(Path("runs/other"), {**SETTINGS, "reuse": "runs/demo"})
    other.done("letters")
    assert [row.state for row in other.status({}).rows] == [*["reused"] * 3, *["to do"] * 4, "done"]


@pytest.mark.parametrize("path, content, remark", [
    ("config.yaml", "train: [half", ""), ("config.yaml", "train: 3\nreuse: []\n", ""), ("config.yaml", None, ""),
    ("launch/chain.json", '{"id": "c1", "jo', ""), ("train/STATE.json", '{"status": "ru', ""),
    ("train/STATE.json", '{"status": "failed", "job": 16, "reason": ["why"]}', ""), ("train/PROGRESS.json", "", ""),
    ("train/PROGRESS.json", '{"done": "many", "total": 5, "unit": "steps"}', ""),
    ("train/manifest.json", '{"format": 99}', "written by another version"), ("train/manifest.json", "{", "is damaged"),
    ("launch/attempts/16.jsonl", "{\n[]\n3\n", ""), ("launch/nodes.jsonl", "3\n", ""), ("launch/stop", "", ""),
    (".locks/train", "process", "")])
def test_files_that_are_torn_or_foreign(run, path, content, remark):
    run.training()
    (run.folder / path).unlink(missing_ok=True)
    if content is not None:
        write_text(run.folder / path, content)
    shown = run.text({"16": "RUNNING", **DEPENDENTS})
    assert (remark in shown and ("train      failed" if remark else "train      running") in shown) or "chain" in path


def test_an_empty_run_folder(run):
    (run.folder / "config.yaml").unlink()
    seen = run.status({})
    assert {row.state for row in seen.rows} == {"to do"} and seen.outcome is None


def test_evaluations_nodes_and_a_request_to_stop(run):
    """By what each is known: a job in the queue, a record of failure, a checkpoint without a result."""
    write_text(run.folder / "config.yaml", "train: {steps: 900, checkpoint: {every_steps: 100}}\n"
               "launch: {evaluate: {every_checkpoints: 2}}\n")
    run.submitted(*run.whole_chain(), *(run.job(id, "evaluate", "evaluation", name=f"demo-evaluate-step-{step:08d}")
                                        for id, step in (("30", 200), ("31", 400), ("32", 600))))
    for step in (100, 200, 800, 900):
        write_json(run.folder / f"train/checkpoints/step-{step:08d}/COMPLETE.json", {})
    Seen(run.folder / "evaluations/step-00000200").state("convert", "failed", reason="no space")
    run.state("train", "running", job="16")
    write_text(run.folder / "launch/stop", "maintenance\n")
    for number in range(2):
        add_strike(run.folder, "n3", f"16.{number}", "was late")
    shown = run.text({"16": "RUNNING", "31": "RUNNING", "32": "PENDING Resources"})
    assert ("evaluations of checkpoints: 1 failed (step 200), 1 running (step 400), 1 pending (step 600), 1 owed (step "
            "800)\n") in shown
    assert "the evaluation of step 200 failed: no space" in shown
    assert "training was asked to stop (maintenance); it saves and leaves" in shown
    assert shown.count("node n3") == 1 and "was late; it is left out of the next submission" in shown
