"""How a run is shown, and the program that shows it."""

from __future__ import annotations

from pathlib import Path

from launch import status
from launch.run_status.run_files import read_run
from launch.run_status.run_status import wanted_ids
from launch.slurm.scheduler import JobInfo
from launch.status import find_run, main, overview
from pipeline.files import append_line, write_text
from tests.launch.recorded_slurm import NO_JOB, FakeSlurm
from tests.launch.run_folders import ago
from tests.launch.run_status.conftest import DEPENDENTS, Seen

RUNNING = """\
run       runs/demo, submitted 2026-11-21 11:45 UTC from commit 61ec0478c8 with changes

stage      state    job    elapsed  progress               left
shard      done     12    1 m 05 s
tokenizer  done     13    1 m 05 s
encode     done     15    1 m 05 s
train      running  16   10 m 00 s  320/500 steps 64%  5 m 38 s
convert    waiting  17
evaluate   waiting  18
report     waiting  19
train     nodes n[1-4], loss 4.8000, tokens/s 11,860, goodput 93.4%, restarts 1
evaluations of checkpoints: 1 done; last: step 100, 1.626 bits per byte

! train crashed before and was started again: rank 2 on n3 was killed by signal 9"""

FAILED = """\
run       runs/demo, submitted 2026-11-21 11:45 UTC from commit 61ec0478c8 with changes

stage      state   job  progress
shard      failed  11   read 3/4 parts 75%, 1 failed (2)
tokenizer  to do   13
encode     to do   15
train      to do   16
convert    to do   17
evaluate   to do   18
report     to do   19

! shard failed: element 2 of read ended FAILED. Logs: runs/demo/logs/shard/11_2.*,
  runs/demo/logs/slurm/11.log
! to go on: python launch/submit.py --stage all --config configs/demo.yaml --nodes 4"""


def test_a_chain_that_runs(run):
    run.training(restart=1, attempt=1)
    run.attempt("ended", "train", "16", status="crashed", reason="rank 2 on n3 was killed by signal 9")
    Seen(run.folder / "evaluations/step-00000100").done("evaluate", counts={"bits_per_byte": 1.6259})
    answers = {"16": JobInfo("16", "RUNNING", "", "n[1-4]", 600), **DEPENDENTS}
    assert run.text(answers, 100) == RUNNING
    assert max(map(len, run.text(answers, 80).splitlines())) <= 80
    run.trained(321, loss="nan")
    assert "loss nan" in run.text(answers)


def test_a_chain_whose_array_failed(run):
    run.submitted(*run.whole_chain())
    run.begun("shard")
    for index in (0, 1, 3):
        run.part("shard", "read", index, 4)
    answers = {"11": "FAILED", **{f"11_{index}": "COMPLETED" for index in (0, 1, 3)}, "11_2": "FAILED"}
    assert run.text(answers, 100) == FAILED
    answers |= {"11": JobInfo("11", "RUNNING", nodes="n1", elapsed_s=30), "11_2": "RUNNING"}
    row = run.row(answers, "shard")
    assert (row.state, row.progress, row.figures, row.elapsed) == ("running", "read 3/4 parts 75%", "nodes n1", "30 s")


def test_a_chain_that_is_done(run):
    run.training().done("train", "convert", "evaluate", "report", until=100)
    seen = run.status({})
    assert seen.outcome == "done" and {row.state for row in seen.rows} == {"done"} and not seen.remarks
    assert wanted_ids(read_run(run.folder)) == [], "Slurm need not be asked"


def test_progress_of_units(run):
    """Of a stage in phases, and what is left of it once it is done."""
    run.begun("shard")
    run.progress("shard", 5, 7, "shards", phase="write", left_s=9.0)
    assert (run.row({}, "shard").progress, run.row({}, "shard").left) == ("write 5/7 shards 71%", "")
    run.done("shard")
    assert run.row({}, "shard").progress == ""


def test_overview(run, tmp_path):
    run.training()
    Seen(Path("runs/new"))
    Seen(Path("runs/old")).done("shard", "tokenizer", "encode", "train", "convert", "evaluate", "report")
    slurm = FakeSlurm(tmp_path / "bin")
    slurm.queue(("16", "RUNNING", "None", "n[1-4]", "10:00"), *((id, "PENDING", "Dependency") for id in DEPENDENTS))
    assert overview(Path("runs"), slurm.scheduler()) == [
        "run   done  stage  state    job    elapsed  progress               left",
        "demo  3/7   train  running  16   10 m 00 s  320/500 steps 64%  5 m 38 s",
        "new   0/0   shard  to do", "old   7/7          done"]
    assert len(slurm.calls()) == 1, "Slurm is asked once for all runs"
    run.state("train", "preempted", job="16")
    slurm.say("squeue", error=NO_JOB, status=1)
    assert "train  stopped" in overview(Path("runs"), slurm.scheduler())[1], "not what it took along"
    assert overview(Path("nothing"), slurm.scheduler()) == ["no runs in nothing"]


def test_run_is_found_by_name_or_folder(run, capsys):
    assert find_run("demo") == find_run("runs/demo") == Path("runs/demo")
    assert main(["--run", "dmo"]) == 2 and main(["--watch"]) == 2
    assert "There is no run dmo. The runs in runs are: demo." in capsys.readouterr().err


def test_watch_ends_with_the_chain(run, tmp_path, monkeypatch, capsys):
    """Seen running, then done; and, of another run, failed."""
    slurm = FakeSlurm(tmp_path / "bin")
    slurm.queue(("16", "RUNNING", "None", "n[1-4]", "10:00"))
    monkeypatch.setenv("PATH", str(slurm.folder))
    monkeypatch.setattr(status.time, "sleep", lambda seconds: run.done(
        "train", "convert", "evaluate", "report", until=1))
    run.training()
    assert main(["--run", "demo", "--watch", "0.01"]) == 0
    seen = capsys.readouterr().out
    assert seen.count("train      running") == 1 and seen.count("train      done") == 2
    run.state("train", "failed", job="16", reason="why")
    (run.folder / "train/manifest.json").unlink()
    slurm.say("squeue", error=NO_JOB, status=1)
    monkeypatch.setattr(status.time, "sleep", lambda seconds: None)
    assert main(["--run", "demo", "--watch", "0.01"]) == 1
    assert "train failed: why" in capsys.readouterr().out


def test_only_reads_and_commands_no_terminal(run, tmp_path, monkeypatch, capsys):
    """Also where foreign files say what a terminal would obey; without Slurm."""
    run.training("failed", reason="why\x1b]0;title\x07 \x9b31m \u202eback")
    run.state("encode", "running", job="14\x1b[2J")
    (run.folder / "encode/manifest.json").unlink()
    append_line(run.folder / "launch/nodes.jsonl", {"node": "n3\x1b[2J", "at": ago(0), "job": "16.0", "reason": "\x07"})
    write_text(run.folder / "launch/stop", "\x1b[2J")
    before = sorted((path, path.stat().st_mtime_ns) for path in tmp_path.rglob("*"))
    monkeypatch.setenv("PATH", "/nowhere")
    for arguments in (["--run", "demo"], []):
        assert main(arguments) == 0
        shown = capsys.readouterr().out
        assert all(one.isprintable() or one == "\n" for one in shown) and "Slurm does not answer" in shown
        assert not arguments or "why\\x1b]0;title" in shown
    assert main(["--run", "\x1b[2J"]) == 2 and "\x1b" not in capsys.readouterr().err
    assert sorted((path, path.stat().st_mtime_ns) for path in tmp_path.rglob("*")) == before
