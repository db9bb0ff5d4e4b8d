"""Stages on this box: streams, manifests rather than exit codes, signals, orphans."""

from __future__ import annotations

import fcntl
import io
import os
import pty
import re
import signal
import subprocess
from pathlib import Path

import pytest

from launch.child import Lines
from launch.local import find_machine
from launch.plan import Machine, local_ranks
from pipeline.config.tree import Config
from tests.launch.fake_house import House
from tests.waiting import wait_for


def test_the_whole_chain_then_nothing_to_do(house: House) -> None:
    """In a folder whose files are named like our modules and shadow none, with a thread count of the user's own."""
    for name in ("pipeline.py", "launch.py", "random.py", "submitit.py"):
        (house.work / name).write_text("raise SystemExit('the wrong module')\n")
    result = house.submit("--stage", "all", OMP_NUM_THREADS="7")
    assert result.returncode == 0, result.stderr
    assert "train rank 0 of 2 threads 7" in result.stdout and "evaluate rank 0 of 2" in result.stdout
    assert "all done in" in result.stdout
    log = (house.run / "logs" / "train.log").read_text()
    assert re.match(r"==== \d{4}-\d\d-\d\d .* pipeline\.train --config config\.yaml\n", log)
    assert "train rank 0 of 2" in log
    house.forget()
    again = house.submit("--stage", "all")
    assert again.returncode == 0 and not house.started()
    assert again.stdout.count("up to date") == 7
    assert (house.run / "logs" / "train.log").read_text() == log, "no process was started for it"


def test_exit_status_0_without_a_manifest_is_a_failure(house: House) -> None:
    result = house.submit("--stage", "all", FAKE_tokenizer="silent")
    assert result.returncode == 1
    assert "tokenizer ended with exit status 0, but it is not done" in result.stderr
    assert house.started() == ["shard-0", "tokenizer-0"]


def test_an_exit_status_is_no_evidence_against_a_manifest(house: House) -> None:
    result = house.submit("--stage", "shard,tokenizer", FAKE_shard="late")
    assert result.returncode == 0
    assert "shard had committed its outputs when it ended with exit status 3" in result.stderr


def test_an_old_manifest_does_not_make_a_failed_rebuild_done(ready: House) -> None:
    with (ready.run / ".locks" / "encode").open("a") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        result = ready.submit("--stage", "encode", "--force")
    assert result.returncode == 2 and "is in use by" in result.stderr and not ready.started()


def test_a_failed_stage_speaks_for_itself(house: House) -> None:
    plain = house.submit("--stage", "all", FAKE_shard="fail")
    assert plain.returncode == 2
    assert "shard stops here: the third record of corpus.txt is broken. Mend it." in plain.stderr
    assert "shard failed (exit status 2)" in plain.stderr and house.started() == ["shard-0"]


def test_a_failed_rank_speaks_for_itself(ready: House) -> None:
    ranks = ready.submit("--stage", "train", FAKE_train="fail")
    assert ranks.returncode == 2, "the status of the rank, not the agent's 1"
    assert ranks.stderr.count("train stops here: the third record of corpus.txt is broken. Mend it.") == 1
    for noise in ("ChildFailedError", "Traceback", "torch.distributed.elastic", "Root Cause"):
        assert noise not in ranks.stderr + ranks.stdout
    log = (ready.run / "logs" / "train.log").read_text()
    assert "train stops here" in log and "Root Cause" in log, "the agent's account is kept"


def test_a_killed_rank_is_named(ready: House) -> None:
    result = ready.submit("--stage", "train", FAKE_train="killed")
    assert result.returncode == 137 and "killed by signal 9" in result.stderr and "memory" in result.stderr
    wait_for(lambda: not ready.alive())


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_request_to_stop_lets_ranks_save(ready: House, number: int) -> None:
    launcher = ready.start("--stage", "train,convert", FAKE_train="slow")
    wait_for(lambda: len(list(ready.pids.glob("train-?.ready"))) == 2)
    launcher.send_signal(number)
    _, errors = launcher.communicate()
    assert launcher.returncode == 130
    assert len(list(ready.pids.glob("train-?.saved"))) == 2, "both ranks ended in their own way"
    assert not ready.alive() and "convert-0" not in ready.started()
    assert "stopped in train; the same command continues" in errors and "Traceback" not in errors


def test_a_request_to_stop_ends_a_plain_stage(house: House) -> None:
    launcher = house.start("--stage", "all", "--force", FAKE_shard="slow")
    wait_for(lambda: (house.pids / "shard-0.ready").exists())
    launcher.send_signal(signal.SIGINT)
    _, errors = launcher.communicate()
    assert launcher.returncode == 130 and not house.alive()
    assert "Traceback" not in errors
    assert "the same command without --force continues" in errors
    assert house.submit("--stage", "shard").returncode == 0


def test_the_second_request_kills(ready: House) -> None:
    launcher = ready.start("--stage", "train", FAKE_train="stubborn")
    wait_for(lambda: len(list(ready.pids.glob("train-?.ready"))) == 2)
    launcher.send_signal(signal.SIGINT)
    assert launcher.stderr is not None
    while "once more to kill it" not in launcher.stderr.readline():
        assert launcher.poll() is None
    assert launcher.poll() is None and len(ready.alive()) == 2, "they were asked, and do not listen"
    launcher.send_signal(signal.SIGINT)
    _, errors = launcher.communicate()
    assert launcher.returncode == 130 and "killing train" in errors
    wait_for(lambda: not ready.alive())


@pytest.mark.parametrize("stage", ["shard", "train"])
def test_a_killed_launcher_leaves_no_orphans(ready: House, stage: str) -> None:
    launcher = ready.start("--stage", stage, "--force", **{f"FAKE_{stage}": "slow"})
    ranks = 2 if stage == "train" else 1
    wait_for(lambda: len(list(ready.pids.glob(f"{stage}-?.ready"))) == ranks)
    launcher.kill()
    wait_for(lambda: not ready.alive())
    launcher.communicate()


def test_a_killed_agent_leaves_no_orphans(ready: House) -> None:
    launcher = ready.start("--stage", "train", FAKE_train="stubborn")
    wait_for(lambda: len(list(ready.pids.glob("train-?.ready"))) == 2)
    stat = Path("/proc", (ready.pids / "train-0").read_text(), "stat").read_text()
    os.kill(int(stat.rpartition(")")[2].split()[1]), signal.SIGKILL)
    _, errors = launcher.communicate()
    assert launcher.returncode == 137 and "killed by signal 9" in errors
    wait_for(lambda: not ready.alive())


def test_a_stage_on_a_terminal_knows_it_and_the_log_stays_plain(house: House) -> None:
    reader, writer = pty.openpty()
    launcher = subprocess.Popen(house.command("--config", "config.yaml", "--stage", "shard"), cwd=house.work,
                                env=house.environ(), stdout=writer, stderr=writer)
    os.close(writer)
    shown = b""
    while True:
        try:
            shown += os.read(reader, 4096)
        except OSError:
            break
    os.close(reader)
    assert launcher.wait() == 0
    assert b"terminal True" in shown
    log = (house.run / "logs" / "shard.log").read_bytes()
    assert b"terminal True" in log and b"\r" not in log and b"\x1b" not in log


def test_a_closed_output_does_not_end_the_run(house: House) -> None:
    launcher = subprocess.Popen(house.command("--config", "config.yaml", "--stage", "shard,tokenizer"), cwd=house.work,
                                env=house.environ(), stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert launcher.stdout is not None and launcher.stderr is not None
    while not launcher.stdout.readline().startswith(b"shard rank"):
        pass
    launcher.stdout.close()
    launcher.stderr.close()
    assert launcher.wait() == 0
    assert (house.run / "tokenizer" / "manifest.json").exists()


def test_lines_keep_the_last_drawing_of_a_live_line() -> None:
    log = io.BytesIO()
    lines = Lines(log)
    for chunk in (b"\r\x1b[K1/3", b"\r\x1b[K2/3\r", b"\x1b[Kdone", b" 3/3\nnext\r\n", b"rest"):
        lines.feed(chunk)
    lines.close()
    assert log.getvalue() == b"done 3/3\nnext\nrest\n"


@pytest.mark.parametrize(("processes", "gpus", "ranks"), [
    (None, 0, 1), (3, 0, 3), (None, 4, 4), (2, 4, 2), (2, 1, 1)])
def test_ranks_on_this_box(processes: int | None, gpus: int, ranks: int) -> None:
    config = Config.model_validate({"launch": {"processes": processes}})
    assert local_ranks(config, Machine(cores=8, gpus=gpus)) == ranks


def test_gpus_are_counted_without_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 'GPU 0: NVIDIA X (UUID: GPU-1)'\necho '  MIG 1g'\n"
                    "echo 'GPU 1: NVIDIA X (UUID: GPU-2)'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert find_machine().gpus == 2
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert find_machine().gpus == 1
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert find_machine().gpus == 0
