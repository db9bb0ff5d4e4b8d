"""Stages on this box: what follows from their ends, streams, signals, orphans."""

import fcntl
import json
import os
import pty
import signal
import subprocess
import termios

import pytest

from drover.launch.job import runner
from drover.launch.job.host import process_end
from drover.launch.local import LocalHost, find_machine
from drover.launch.plan import Machine, local_ranks
from drover.pipeline.config.tree import Config
from drover.pipeline.contract.state import StageJob, write_state
from tests.refusal import table


def test_a_chain(ready):
    """In a folder whose files are named like our modules and shadow none, with a thread count of the user's own, in a
    shell with variables of a rank."""
    for name in ("pipeline.py", "launch.py", "random.py", "submitit.py"):
        (ready.work / name).write_text("raise SystemExit('the wrong module')\n")
    left_over = {"RANK": "1", "WORLD_SIZE": "3", "MASTER_ADDR": "nosuch.invalid", "TORCHELASTIC_RUN_ID": "none"}
    result = ready.submit("--stage", "encode,train,convert", OMP_NUM_THREADS="7", **left_over)
    assert result.returncode == 0, result.stderr
    assert "train rank 0 of 2 threads 7" in result.stdout and "convert rank 0 of -" in result.stdout
    assert "encode    up to date" in result.stdout and "all done in" in result.stdout
    assert "train rank 0 of 2" in (ready.run / "logs/train/latest/output.log").read_text()
    assert ready.started() == ["convert-0", "train-0", "train-1"]
    ready.check_secret()


# ---- what follows from a stage's end, with ends that are played


@pytest.mark.parametrize("plays, forced, status, words", table("""
    0 -> false -> 1 -> shard failed: ended as if all were well, but is not done (the module of a stage of your own must
    3 done/0 done -> false -> 0 -> all done in
    2 -> true -> 2 -> shard failed (exit status 2). Nothing after it was started. Its output is in runs/trial/logs/\
shard/local.1/output.log. Once the cause is fixed, the same command without --force continues
    137 -> true -> 137 -> shard failed: killed by SIGKILL, as the kernel does when memory runs out (see dmesg); a
    130 preempted -> false -> 130 -> stopped in shard; the same command continues
    143 request -> false -> 130 -> stopped in shard; the same command continues
    0 done request -> false -> 130 -> stopped before tokenizer; the same command continues""", str, json.loads, int))
def test_what_follows_from_each_end(launcher, monkeypatch, plays, forced, status, words):
    """plays: each stage's exit status and last word, and whether a request to stop comes. forced: there is a manifest
    from before, which proves nothing."""
    left, commands = plays.split("/"), []
    monkeypatch.setattr(runner, "PAUSE_S", 0.0)
    if forced:  # by a run that the launcher did not make, whose last word is no start's of the launcher
        launcher.done("shard", "tokenizer")
        write_state(launcher.run / "shard", "done")

    def start(host, spec, command, environment, folder, each):
        end, *said = left.pop(0).split()
        commands.append(command)
        (folder / "output.log").touch()
        host.requests += [signal.SIGTERM] * ("request" in said)
        if "done" in said:
            launcher.done(spec.stage)
        for word in {"done", "preempted"}.intersection(said):
            write_state(spec.folder, word, attempt=StageJob.parse(command[command.index("--job") + 1]).start)
        return process_end(int(end))

    monkeypatch.setattr(LocalHost, "start", start)
    result = launcher.submit(f"--stage shard,tokenizer --cluster local launch.max_restarts=1 {'--force' * forced}")
    assert result.returncode == status and words in result.stdout + result.stderr, result.stderr
    assert not left and ("--force" in " ".join(commands[0])) == forced and "--force" not in commands[0]
    assert f"start {int(forced)}: one process" in (launcher.run / "logs/local.log").read_text()


# ---- streams


def on_a_terminal(house, stages, **variables):
    """The launcher on a terminal of its own, and the terminal's other end."""
    reader, writer = pty.openpty()
    launcher = subprocess.Popen(house.command("--config", "config.yaml", "--stage", stages), cwd=house.work,
                                env=house.environ(**variables), stdin=writer, stdout=writer, stderr=writer,
                                start_new_session=True, preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0))
    os.close(writer)
    return launcher, reader


def test_a_stage_on_a_terminal_knows_it_and_the_log_stays_plain(house):
    (launcher, reader), shown = on_a_terminal(house, "shard"), b""
    while True:
        try:
            shown += os.read(reader, 4096)
        except OSError:
            break
    os.close(reader)
    assert launcher.wait() == 0
    assert b"terminal True" in shown
    log = (house.run / "logs/shard/latest/output.log").read_bytes()
    assert b"terminal True" in log and b"\r" not in log and b"\x1b" not in log


def test_a_closed_terminal_is_a_request_to_stop(ready):
    launcher, reader = on_a_terminal(ready, "train,convert", FAKE_train="slow")
    ready.wait_for_bodies("train", 2)
    os.close(reader)
    assert launcher.wait() == 130 and len(list(ready.pids.glob("train-?.saved"))) == 2 and not ready.alive()
    assert "convert-0" not in ready.started()


@pytest.mark.parametrize("processes, gpus, device, ranks", table("""
    null -> 0 -> auto -> 1
    3 -> 0 -> cpu -> 3
    null -> 4 -> cuda -> 4
    2 -> 4 -> auto -> 2
    2 -> 1 -> auto -> 1
    3 -> 0 -> mps -> 1""", json.loads, int, str, int))
def test_ranks_on_this_box(processes, gpus, device, ranks):
    config = Config.model_validate({"launch": {"processes": processes, "device": device}})
    assert local_ranks(config, Machine(cores=8, gpus=gpus)) == ranks


@pytest.mark.parametrize("visible, gpus, mib", table("""
    null -> 2 -> 40960
    "1" -> 1 -> 40960
    "0" -> 1 -> 81559
    "" -> 0 -> null""", *[json.loads] * 3))
def test_gpus_are_counted_without_torch(programs, monkeypatch, visible, gpus, mib):
    """Without any, the memory is the host's."""
    programs.do("nvidia-smi", "case \"$*\" in *--id=0) ;; *) echo 40960;; esac\n"
                              "case \"$*\" in *--id=1) ;; *) echo 81559;; esac")
    monkeypatch.setenv("PATH", str(programs.folder), prepend=os.pathsep)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    found = find_machine()
    assert found.gpus == gpus and (found.memory == mib << 20 if mib else 0 < found.memory < 1 << 60)
