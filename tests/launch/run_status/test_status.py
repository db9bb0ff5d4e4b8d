"""How a run is shown: from run folders made by hand, and Slurm's answers."""

from __future__ import annotations

import platform
import subprocess
import sys
from pathlib import Path

import pytest

from launch.run_status.run_files import read_run
from launch.run_status.run_status import wanted_ids
from launch.slurm.nodes import add_strike
from launch.slurm.scheduler import JobInfo
from pipeline.contract.state import STOP
from pipeline.files import append_line, write_json, write_text
from tests.launch.run_folders import SETTINGS, HandMade, ago
from tests.launch.run_status.judged import DEPENDENTS, row_of, standing, states, text, training

RUNNING = """\
run       runs/demo, submitted 2026-11-21 11:10 UTC from commit 61ec0478c8 with changes

stage      state    job  nodes     elapsed  progress          ETA
shard      done     12            1 m 05 s
tokenizer  done     13            1 m 05 s
encode     done     15            1 m 05 s
train      running  16   n[1-4]  10 m 00 s  320/500 64%  5 m 38 s
convert    waiting  17
evaluate   waiting  18
report     waiting  19
train     loss 4.8000, tokens/s 11,860, restarts 1, goodput 93.4%
evaluations of checkpoints: 1 done, 1 queued (step 200), 1 owed (step 300); last: step 100, 1.626
          bits per byte, python_line acc 0.950

! train crashed before and was started again: rank 2 on n3 was killed by signal 9
! node n3 failed at 2026-11-21T11:51: failed preflight: no write access to /scratch"""

RUNNING_WIDE = """\
train      running  16   n[1-4]  10 m 00 s  320/500 64%  5 m 38 s  4.8000    11,860         1    93.4%"""

FAILED = """\
run       runs/demo, submitted 2026-11-21 11:45 UTC from commit 61ec0478c8 with changes

stage      state    job   elapsed  progress       loss  tokens/s
shard      done     12   1 m 05 s
tokenizer  done     13   1 m 05 s
encode     done     15   1 m 05 s
train      failed   16             320/500 64%  4.8000    11,860
convert    removed  17
evaluate   removed  18
report     removed  19

! train failed: the loss is NaN (after step 300). Logs: runs/demo/logs/train/16.0
! convert, evaluate, report: not in the queue any more, for a stage before ended badly or was
  cancelled
! to go on, once the cause is mended: python launch/submit.py --stage all --config configs/demo.yaml
  --nodes 4"""

ARRAY = """\
run       runs/demo, submitted 2026-11-21 11:45 UTC from commit 61ec0478c8 with changes

stage      state    job    progress
shard      failed   11 x4  3/4 done, 1 failed (element 2)
tokenizer  removed  13
encode     removed  15
train      removed  16
convert    removed  17
evaluate   removed  18
report     removed  19

! shard failed: element 2 ended FAILED. Logs: runs/demo/logs/shard/11_2.*,
  runs/demo/logs/slurm/11.log
! tokenizer, encode, train, convert, evaluate, report: not in the queue any more, for a stage before
  ended badly or was cancelled
! to go on, once the cause is mended: python launch/submit.py --stage all --config configs/demo.yaml
  --nodes 4"""

LOCAL = """\
run       runs/demo

stage      state     elapsed  progress          ETA    loss  tokens/s
shard      done     1 m 05 s
tokenizer  done     1 m 05 s
encode     done     1 m 05 s
train      running            320/500 64%  5 m 38 s  4.8000    11,860
convert    to do
evaluate   to do
report     to do"""


def test_running_chain(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = HandMade(Path("runs/demo"), {**SETTINGS, "launch": {"evaluate": {"every_checkpoints": 1}}})
    run.submitted(*run.whole_chain(), *(run.job(id, "evaluate", "evaluation", name=f"demo-evaluate-step-{step:08d}")
                                        for id, step in (("30", 100), ("31", 200))), seconds=3000)
    run.done("shard", "tokenizer", "encode")
    run.state("train", "running", job="16", restart=1)
    run.trained(320, goodput=0.934)
    run.attempt("attempt", "train", "16")
    run.attempt("ended", "train", "16", status="crashed", reason="rank 2 on n3 was killed by signal 9")
    run.attempt("attempt", "train", "16", start=1)
    write_json(run.folder / "train/checkpoints/step-00000300/COMPLETE.json", {})
    evaluation = HandMade(run.folder / "evaluations/step-00000100")
    evaluation.done("evaluate")
    write_json(evaluation.folder / "evaluate/results.json", {
        "heldout": {"overall": {"bits_per_byte": 1.6259}},
        "tasks": {"python_line": {"metrics": {"acc": {"value": 0.95}}}}})
    append_line(run.folder / "launch/nodes.jsonl", {
        "node": "n3", "at": ago(500), "job": "16.0", "reason": "failed preflight: no write access to /scratch"})
    jobs = {"16": JobInfo("16", "RUNNING", "", "n[1-4]", 600, 1), "31": JobInfo("31", "PENDING", "Resources"),
            **DEPENDENTS}
    assert text(run, jobs) == RUNNING
    assert RUNNING_WIDE in text(run, jobs, 160).splitlines()
    assert max(map(len, text(run, jobs, 80).splitlines())) <= 80
    assert standing(run, jobs).outcome is None


def test_failed_chain(run):
    training(run)
    run.state("train", "failed", job="16", step=300, reason="the loss is NaN")
    run.log("train/16.0/rank0.out")
    (run.folder / "logs/train/latest").symlink_to("16.0")
    assert text(run, {"16": JobInfo("16", "FAILED", "NonZeroExitCode")}) == FAILED
    assert standing(run, {}).outcome == "failed"


def test_array_with_a_failed_element(run):
    run.submitted(*run.whole_chain())
    run.begun("shard")
    for index in (0, 1, 3):
        run.part("shard", "read", index, 4)
    elements = {f"11_{index}": JobInfo(f"11_{index}", "FAILED" if index == 2 else "COMPLETED") for index in range(4)}
    jobs = {"11": JobInfo("11", "FAILED"), **elements}
    assert text(run, jobs) == ARRAY
    jobs |= {"11": JobInfo("11", "RUNNING", nodes="n1", elapsed_s=30), "11_2": JobInfo("11_2", "RUNNING")}
    row = row_of(run, jobs, "shard")
    assert (row.state, row.progress, row.nodes, row.elapsed_s) == ("running", "3/4 done", "n1", 30)


def test_arrays_of_several_phases(run):
    arrays = [run.job(id, "shard", "array", (0, 1), (), parts=2, name=f"demo-shard-{phase}", phase=phase)
              for id, phase in (("20", "read"), ("21", "sort"), ("22", "write"))]
    run.submitted(*arrays, run.job("23", "shard", "finalise"))
    run.begun("shard")
    for phase, index in (("read", 0), ("read", 1), ("sort", 1)):
        run.part("shard", phase, index, 2)

    def infos(**ended):
        """By the jobs' ids, after a letter."""
        return {id[1:]: JobInfo(id[1:], *state.split()) for id, state in {"_20": "COMPLETED", **ended}.items()}

    row = row_of(run, infos(_21="RUNNING", _22="PENDING Dependency", _23="PENDING Dependency"), "shard")
    assert (row.job, row.state, row.progress) == ("21 x2", "running", "sort 1/2 done")
    failed = infos(_21="FAILED", _21_0="FAILED", _21_1="COMPLETED", _22="CANCELLED", _23="CANCELLED")
    row = row_of(run, failed, "shard")
    assert (row.job, row.state, row.progress) == ("21 x2", "failed", "sort 1/2 done, 1 failed (element 0)")
    assert "element 0 of sort ended FAILED" in text(run, failed)
    for phase, index in (("sort", 0), ("write", 0), ("write", 1)):
        run.part("shard", phase, index, 2)
    ended = infos(_21="COMPLETED", _22="COMPLETED", _23="RUNNING")
    assert row_of(run, ended, "shard").progress == "write 2/2 done"


def test_local_run(run, tmp_path):
    run.done("shard", "tokenizer", "encode")
    run.trained(320)
    with subprocess.Popen([sys.executable, "-c", "input()", "-m", "pipeline.train"], stdin=subprocess.PIPE) as process:
        write_text(run.folder / ".locks/train", f"process {process.pid} on {platform.node()}, since {ago(600)}\n")
        shown = text(run, {})
        process.communicate(b"\n")
    assert shown == LOCAL
    assert states(run, {})["train"] == "stopped", "its process is gone, and left no word"
    run.state("train", "running")
    assert states(run, {})["train"] == "gone"
    assert "the process is not there; it was killed" in text(run, {}, 1000)
    write_text(run.folder / ".locks/train", f"process 1 on another-machine, since {ago(600)}\n")
    assert states(run, {})["train"] == "running?"
    assert wanted_ids(read_run(run.folder)) == []


def test_done_chain(run):
    training(run)
    run.done("train", "convert", "evaluate", "report", until=100)
    run.attempt("job", "train", "16", seconds=465)
    seen = standing(run, {})
    assert seen.outcome == "done" and {row.state for row in seen.rows} == {"done"} and not seen.remarks
    assert row_of(run, {}).elapsed_s == 365, "over all of its starts"
    assert wanted_ids(read_run(run.folder)) == [], "Slurm need not be asked"


def test_links_of_training(run):
    run.submitted(*(run.job(id, "train", "link") for id in ("21", "22", "23")))
    run.state("train", "preempted", job="21", again=True)
    jobs = {"21": JobInfo("21", "COMPLETED"), "22": JobInfo("22", "RUNNING", elapsed_s=5),
            "23": JobInfo("23", "PENDING", "Dependency")}
    row = row_of(run, jobs)
    assert (row.job, row.state, row.elapsed_s) == ("22 (2/3)", "starting", 5)


def test_units_of_encode_are_counted_against_the_text_shards(run):
    run.done("shard", outputs=[{"path": path, "bytes": 1, "sha256": ""}
                                for path in (*(f"train/{n}.tar" for n in range(7)), "rejected.jsonl")])
    run.begun("encode")
    run.units("encode", "encode", 5)
    run.units("encode", "parts", 2)
    row = row_of(run, {}, "encode")
    assert (row.state, row.progress) == ("stopped", "5/7 shards")


def test_reused_stages(run):
    run.done("shard", "tokenizer", "encode")
    other = HandMade(Path("runs/other"), {**SETTINGS, "reuse": "runs/demo"})
    assert states(other, {}) == {"shard": "reused", "tokenizer": "reused", "encode": "reused", **dict.fromkeys(
        ("train", "convert", "evaluate", "report"), "to do")}


def test_time_to_go_counts_what_lies_between_the_steps(run):
    training(run)
    jobs = {"16": JobInfo("16", "RUNNING")}
    assert row_of(run, jobs).eta_s == pytest.approx(180 * 600 / 320), "320 steps took 600 s, though each says 1 s"
    append_line(run.folder / "train/events.jsonl", {"event": "resume", "time": ago(3), "step": 318})
    assert row_of(run, jobs).eta_s == pytest.approx(180), "two steps say little: what steps themselves took"


def test_nodes_and_stop_request(run):
    training(run)
    for number in range(2):
        add_strike(run.folder, "n3", f"16.0.{number}", "was late")
    write_text(run.folder / STOP, "maintenance\n")
    said = text(run, {"16": JobInfo("16", "RUNNING"), **DEPENDENTS}, 1000)
    assert said.count("node n3") == 1 and "was late; it is left out of the next submission" in said
    assert "training was asked to stop: maintenance; it saves and leaves" in said


@pytest.mark.parametrize("path, content", [
    ("config.yaml", "train: [half"), ("launch/chain.json", '{"id": "c1", "jo'), ("train/STATE.json", '{"status": "ru'),
    ("train/metrics.jsonl", '{"step": 320, "lo'), ("train/metrics.jsonl", ""), ("train/events.jsonl", "\x00\x00\n[]\n"),
    ("train/manifest.json", '{"format": 99}'), ("launch/attempts/16.jsonl", "{\n[]\n"), ("launch/nodes.jsonl", "3\n"),
    ("launch/stop", ""), (".locks/train", "process")])
def test_half_written_files(run, path, content):
    training(run)
    write_text(run.folder / path, content)
    shown = text(run, {})
    assert "train " in shown
    assert path != "train/manifest.json" or ("damaged" in shown and "written by another version" in shown)


def test_a_loss_that_is_no_number(run):
    training(run)
    run.trained(20, loss="NaN")
    assert " nan" in text(run, {"16": JobInfo("16", "RUNNING"), **DEPENDENTS}, 160)


def test_empty_run_folder(run):
    (run.folder / "config.yaml").unlink()
    assert set(states(run, {}).values()) == {"to do"} and standing(run, {}).outcome is None
