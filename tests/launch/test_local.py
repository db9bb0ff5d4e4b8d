"""Stages on this box: what follows from their ends; its ranks and GPUs."""

import json
import os
import signal

import pytest

from drover.launch.job import runner
from drover.launch.job.host import process_end
from drover.launch.local import LocalHost, find_machine
from drover.launch.plan import Machine, local_ranks
from drover.pipeline.config.tree import Config
from drover.pipeline.contract.state import StageJob, write_state
from tests.refusal import table

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
    from before, which proves nothing. The shell has variables of a rank, and a thread count of the user's own."""
    left, commands = plays.split("/"), []
    left_over = {"RANK": "1", "WORLD_SIZE": "3", "MASTER_ADDR": "nosuch.invalid", "TORCHELASTIC_RUN_ID": "none"}
    monkeypatch.setattr(runner, "PAUSE_S", 0.0)
    if forced:  # by a run that the launcher did not make, whose last word is no start's of the launcher
        launcher.done("shard", "tokenizer")
        write_state(launcher.run / "shard", "done")

    def start(host, spec, command, environment, folder, each):
        end, *said = left.pop(0).split()
        assert environment["OMP_NUM_THREADS"] == "7" and environment["PYTHONSAFEPATH"] == "1"
        assert left_over.keys().isdisjoint(environment)
        commands.append(command)
        (folder / "output.log").touch()
        host.requests += [signal.SIGTERM] * ("request" in said)
        if "done" in said:
            launcher.done(spec.stage)
        for word in {"done", "preempted"}.intersection(said):
            write_state(spec.folder, word, attempt=StageJob.parse(command[command.index("--job") + 1]).start)
        return process_end(int(end))

    monkeypatch.setattr(LocalHost, "start", start)
    result = launcher.submit(f"--stage shard,tokenizer --cluster local launch.max_restarts=1 {'--force' * forced}",
                             OMP_NUM_THREADS="7", **left_over)
    assert result.returncode == status and words in result.stdout + result.stderr, result.stderr
    assert not left and ("--force" in " ".join(commands[0])) == forced and "--force" not in commands[0]
    assert f"start {int(forced)}: one process" in (launcher.run / "logs/local.log").read_text()


@pytest.mark.parametrize("processes, gpus, device, ranks", table("""
    null -> 0 -> auto -> 1
    3 -> 0 -> cpu -> 3
    null -> 4 -> cuda -> 4
    2 -> 4 -> auto -> 2
    2 -> 1 -> auto -> 1""", json.loads, int, str, int))
def test_ranks_on_this_box(processes, gpus, device, ranks):
    config = Config.model_validate({"launch": {"processes": processes, "device": device}})
    assert local_ranks(config, Machine(cores=8, gpus=gpus)) == ranks


@pytest.mark.parametrize("visible, gpus", [(None, 2), ("1", 1), ("", 0)])
def test_gpus_are_counted_without_torch(programs, monkeypatch, visible, gpus):
    programs.do("nvidia-smi", "case \"$*\" in *--id=1) ;; *) echo 0;; esac\necho 1")
    monkeypatch.setenv("PATH", str(programs.folder), prepend=os.pathsep)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert find_machine().gpus == gpus
