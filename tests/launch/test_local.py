"""Stages on this box: streams, manifests rather than exit codes, signals, orphans."""

from __future__ import annotations

import io
import os
import pty
import re
import signal
import subprocess
import sys
from contextlib import redirect_stderr
from types import SimpleNamespace

import pytest

from launch import local
from launch.child import Child, Interruptions, Lines
from launch.local import find_machine
from launch.plan import Machine, local_ranks
from pipeline.config.tree import Config
from tests.launch.fake_house import runs
from tests.waiting import wait_for
from tools.slurm_processes import process_table


def test_a_chain(ready):
    """In a folder whose files are named like our modules and shadow none, with a thread count of the user's own."""
    for name in ("pipeline.py", "launch.py", "random.py", "submitit.py"):
        (ready.work / name).write_text("raise SystemExit('the wrong module')\n")
    result = ready.submit("--stage", "encode,train,convert", OMP_NUM_THREADS="7")
    assert result.returncode == 0, result.stderr
    assert "train rank 0 of 2 threads 7" in result.stdout and "convert rank 0 of -" in result.stdout
    assert "encode    up to date" in result.stdout and "all done in" in result.stdout
    log = (ready.run / "logs" / "train.log").read_text()
    assert re.match(r"==== \d{4}-\d\d-\d\d .* pipeline\.train --config config\.yaml\n", log)
    assert "train rank 0 of 2" in log
    assert ready.started() == ["convert-0", "train-0", "train-1"]
    secret, = {(ready.pids / f"train-{rank}.secret").read_text() for rank in range(2)}
    assert len(secret) == 64, "with which the ranks sign"
    assert not [path for path in ready.work.rglob("*") if path.is_file() and secret.encode() in path.read_bytes()]


# ---- what follows from a stage's end, with ends that are played


@pytest.mark.parametrize(("plays", "forced", "status", "words"), [
    ("done done", False, 0, "all done in"),
    ("silent", False, 1, "shard ended with exit status 0, but it is not done"),
    ("late done", False, 0, "shard had committed its outputs when it ended with exit status 3, so it is done"),
    ("fail", False, 2, "shard failed (exit status 2). Nothing after it was started. Its output is in runs/trial/logs/"),
    ("fail", True, 2, "Once the cause is mended, the same command without --force continues"),
    ("9", False, 137, "shard failed (killed by signal 9, as the kernel does when memory runs out"),
    ("15", False, 143, "shard failed (killed by signal 15)"),
    ("stopped", False, 130, "stopped in shard; the same command continues"),
    ("request", False, 130, "stopped in shard; the same command continues"),
    ("done,request", False, 130, "stopped before tokenizer; the same command continues")])
def test_what_follows_from_each_end(launcher, monkeypatch, plays, forced, status, words):
    """forced: there is a manifest from before, which proves nothing."""
    left = plays.split()
    if forced:
        launcher.done("shard", "tokenizer")

    def run(interruptions, stage):
        what = left.pop(0)
        interruptions.count += "request" in what
        if "done" in what or what == "late":
            launcher.done(stage)
        return {"fail": 2, "late": 3, "stopped": 130, "request": 143, "9": 137, "15": 143}.get(what, 0)

    logs = []
    monkeypatch.setattr(local, "_start", lambda job, log: logs.append(str(log)) or SimpleNamespace(run=run))
    result = launcher.submit("--stage", "shard,tokenizer", "--cluster", "local", *["--force"] * forced)
    assert result.returncode == status and words in result.stdout + result.stderr, result.stderr
    assert not left and logs[0] == "runs/trial/logs/shard.log"


ENDS_AT_TERM = "signal.signal(2, signal.SIG_IGN); signal.signal(15, lambda *_: os._exit(7))"
HAS_A_CHILD = "signal.signal(2, signal.SIG_IGN); below = subprocess.Popen(['sleep', '3600']); " \
              "open('{}', 'w').write(str(below.pid))"


@pytest.mark.parametrize(("script", "requests", "patience_s", "status", "said"), [
    ("signal.signal(2, lambda *_: os._exit(5))", 1, 600, 5, "stopping x: it saves what it can (once more to kill it)"),
    (ENDS_AT_TERM, 1, 0.1, 7, "stopping x"), (HAS_A_CHILD, 2, 600, 137, "killing x")])
def test_requests_to_stop(tmp_path, script, requests, patience_s, status, said):
    """The first is passed on, and after a while made stronger; the second kills the stage with what is below it."""
    below, ready = tmp_path / "below", tmp_path / "ready"
    start = f"import os, signal, subprocess, sys, time; {script.format(below)}; open({str(ready)!r}, 'w'); " \
            "time.sleep(3600)"
    with redirect_stderr(io.TextIOWrapper(io.BytesIO())) as errors:
        class Asked:
            """The first request comes once the stage is ready, the second once that is passed on."""

            @property
            def count(self):
                return ready.exists() + (requests > 1 and b"stopping" in errors.buffer.getvalue())

        stage = Child([sys.executable, "-c", start], os.environ, tmp_path / "logs/x.log", stop=signal.SIGINT,
                      orphaned=signal.SIGKILL, patience_s=patience_s)
        assert stage.run(Asked(), "x") == status and said in errors.buffer.getvalue().decode()
    wait_for(lambda: not runs(below))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_requests_are_counted(number):
    before = signal.getsignal(number)
    with Interruptions() as interruptions:
        signal.raise_signal(number)
        assert interruptions.count == 1
    assert signal.getsignal(number) == before


def test_after_nohup_a_closed_terminal_is_no_request():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with Interruptions() as interruptions:
        signal.raise_signal(signal.SIGHUP)
        assert interruptions.count == 0
    signal.signal(signal.SIGHUP, before)


# ---- ranks under the agent


@pytest.mark.slow
def test_a_failed_rank_speaks_for_itself(ready):
    ranks = ready.submit("--stage", "train", FAKE_train="fail")
    assert ranks.returncode == 2, "the status of the rank, not the agent's 1"
    assert ranks.stderr.count("train stops here: the third record of corpus.txt is broken. Mend it.") == 1
    for noise in ("ChildFailedError", "Traceback", "torch.distributed.elastic", "Root Cause"):
        assert noise not in ranks.stderr + ranks.stdout
    assert "Root Cause" in (ready.run / "logs" / "train.log").read_text(), "the agent's account is kept"


def test_a_killed_rank_is_named(ready):
    result = ready.submit("--stage", "train", FAKE_train="killed")
    assert result.returncode == 137 and "killed by signal 9" in result.stderr and "memory" in result.stderr
    wait_for(lambda: not ready.alive())


def test_a_request_to_stop_lets_ranks_save(ready):
    launcher = ready.start("--stage", "train,convert", FAKE_train="slow")
    ready.wait_for_bodies("train", 2)
    launcher.send_signal(signal.SIGINT)
    _, errors = launcher.communicate()
    assert launcher.returncode == 130
    assert len(list(ready.pids.glob("train-?.saved"))) == 2, "both ranks ended in their own way"
    assert not ready.alive() and "convert-0" not in ready.started()
    assert "stopped in train; the same command continues" in errors and "Traceback" not in errors


@pytest.mark.parametrize(("stage", "ranks"), [("shard", 1), pytest.param("train", 2, marks=pytest.mark.slow)])
def test_a_killed_launcher_leaves_no_orphans(ready, stage, ranks):
    launcher = ready.start("--stage", stage, "--force", **{f"FAKE_{stage}": "slow"})
    ready.wait_for_bodies(stage, ranks)
    launcher.kill()
    wait_for(lambda: not ready.alive())
    launcher.communicate()


@pytest.mark.slow
def test_a_killed_agent_leaves_no_orphans(ready):
    launcher = ready.start("--stage", "train", FAKE_train="stubborn")
    ready.wait_for_bodies("train", 2)
    agent = process_table()[int((ready.pids / "train-0").read_text())].parent
    os.kill(agent, signal.SIGKILL)
    _, errors = launcher.communicate()
    assert launcher.returncode == 137 and "killed by signal 9" in errors
    wait_for(lambda: not ready.alive())


# ---- streams


def test_a_stage_on_a_terminal_knows_it_and_the_log_stays_plain(house):
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


def test_a_closed_output_does_not_end_the_run(house):
    launcher = subprocess.Popen(house.command("--config", "config.yaml", "--stage", "shard,tokenizer"), cwd=house.work,
                                env=house.environ(), stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert any(line.startswith(b"shard rank") for line in launcher.stdout)
    launcher.stdout.close()
    launcher.stderr.close()
    assert launcher.wait() == 0
    assert (house.run / "tokenizer" / "manifest.json").exists()


def test_lines_keep_the_last_drawing_of_a_live_line():
    log = io.BytesIO()
    lines = Lines(log)
    for chunk in (b"\r\x1b[K1/3", b"\r\x1b[K2/3\r", b"\x1b[Kdone", b" 3/3\nnext\r\n", b"rest"):
        lines.feed(chunk)
    lines.close()
    assert log.getvalue() == b"done 3/3\nnext\nrest\n"


@pytest.mark.parametrize(("processes", "gpus", "ranks"), [
    (None, 0, 1), (3, 0, 3), (None, 4, 4), (2, 4, 2), (2, 1, 1)])
def test_ranks_on_this_box(processes, gpus, ranks):
    config = Config.model_validate({"launch": {"processes": processes}})
    assert local_ranks(config, Machine(cores=8, gpus=gpus)) == ranks


def test_gpus_are_counted_without_torch(tmp_path, monkeypatch):
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
