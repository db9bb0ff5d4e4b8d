"""The status command: the overview of all runs, finding one, watching, and as a program."""

from __future__ import annotations

from pathlib import Path

from launch import status
from launch.status import find_run, main, overview
from tests.launch.recorded_slurm import NO_JOB, FakeSlurm
from tests.launch.run_folders import HandMade
from tests.launch.run_status.judged import DEPENDENTS, training


def test_overview(run, tmp_path):
    training(run)
    HandMade(Path("runs/new"))
    finished = HandMade(Path("runs/old"))
    finished.done("shard", "tokenizer", "encode", "train", "convert", "evaluate", "report")
    slurm = FakeSlurm(tmp_path / "bin")
    slurm.queue(("16", "RUNNING", "None", "n[1-4]", "10:00"), *((id, "PENDING", "Dependency") for id in DEPENDENTS))
    shown = overview(Path("runs"), slurm.scheduler())
    assert shown == ["run   done  now            job  progress          ETA    loss",
                     "demo  3/7   train running  16   320/500 64%  5 m 38 s  4.8000",
                     "new   0/0   to do",
                     "old   7/7   done"]
    assert len(slurm.calls()) == 1, "Slurm is asked once for all runs"
    run.state("train", "preempted", job="16")
    slurm.say("squeue", error=NO_JOB, status=1)
    assert overview(Path("runs"), slurm.scheduler())[1].split() == ["demo", "3/7", "train", "stopped", "16", "320/500",
                                                                    "64%", "4.8000"], "not what it took along"
    assert overview(Path("nothing"), slurm.scheduler()) == ["no runs in nothing"]


def test_run_is_found_by_name_or_folder(run, capsys):
    assert find_run("demo") == find_run("runs/demo") == Path("runs/demo")
    assert main(["--run", "dmo"]) == 2 and main(["--watch"]) == 2
    assert "There is no run dmo. The runs in runs are: demo." in capsys.readouterr().err


def test_watch_ends_with_the_chain(run, tmp_path, monkeypatch, capsys):
    """Seen running, then done; and, of another run, failed."""
    training(run)
    slurm = FakeSlurm(tmp_path / "bin")
    slurm.queue(("16", "RUNNING", "None", "n[1-4]", "10:00"))
    monkeypatch.setenv("PATH", str(slurm.folder))
    monkeypatch.setattr(status.time, "sleep", lambda seconds: run.done(
        "train", "convert", "evaluate", "report", until=1))
    assert main(["--run", "demo", "--watch", "0.01"]) == 0
    seen = capsys.readouterr().out
    assert seen.count("train      running") == 1 and seen.count("train      done") == 1
    run.state("train", "failed", job="16", reason="why")
    (run.folder / "train/manifest.json").unlink()
    slurm.say("squeue", error=NO_JOB, status=1)
    monkeypatch.setattr(status.time, "sleep", lambda seconds: None)
    assert main(["--run", "demo", "--watch", "0.01"]) == 1
    assert "train failed: why" in capsys.readouterr().out


def test_without_slurm_it_says_what_files_say_and_only_reads(run, tmp_path, monkeypatch, capsys):
    def files():
        return sorted((path, path.stat().st_mtime_ns) for path in tmp_path.rglob("*"))

    training(run)
    before = files()
    monkeypatch.setenv("PATH", "/nowhere")
    assert main(["--run", "demo"]) == 0
    shown = capsys.readouterr().out
    assert "running?" in shown and "! Slurm does not answer" in shown
    assert files() == before


def test_what_a_foreign_file_says_commands_no_terminal(run, monkeypatch, capsys):
    training(run)
    run.state("train", "failed", job="16\x1b[2J", reason="why\x1b]0;title\x07 \x9b31m \u202eback")
    monkeypatch.setenv("PATH", "/nowhere")
    for arguments in (["--run", "demo"], []):
        assert main(arguments) == 0
        shown = capsys.readouterr().out
        assert all(one.isprintable() or one == "\n" for one in shown)
        assert not arguments or "why\\x1b]0;title" in shown
    assert main(["--run", "\x1b[2J"]) == 2 and "\x1b" not in capsys.readouterr().err
