"""A step of ranks: what srun's words mean, when it is ended, and what its tasks become: variables, signal mask."""

import ast
import json
import os
import signal
import subprocess
import sys

import pytest
import yaml

from drover.launch import processes
from drover.launch.devices import visible_gpus
from drover.launch.job import srun
from drover.launch.job.rank import SAVES, defaults, rank_environment
from drover.launch.job.srun import read_end, run_step
from drover.pipeline.contract.stages import REPOSITORY, STAGES
from drover.pipeline.core.errors import UserError
from tests.refusal import refused, table
from tests.waiting import HANG_S


@pytest.mark.parametrize("status, messages, cause, exit_code, started, rank, lost", table("""
    143 -> n2: task 1: Killed -> rank 1 on n2: killed -> null -> true -> 1 -> []
    143 -> n1: tasks 0-1: Terminated | n2: task 3: Exited with exit code 2 -> rank 3 on n2: exited with exit code 2 \
-> 2 -> true -> 3 -> []
    143 -> n1: tasks 4,6: Exited with exit code 143 -> ranks 4,6 on n1: exited with exit code 143 -> 143 -> true -> 4 \
-> []
    143 -> n2: task 1: Killed | Node failure on n3 | Task launch for StepId=1.0 failed on node n4: Socket timed out | \
Node failure on n3 -> lost n3, n4 -> null -> true -> 1 -> ["n3", "n4"]
    143 -> n2: task 1: Killed | step_launch_notify_io_failure: aborting, io error with missing step on node 1 -> \
Slurm lost the tasks of the step's node number 1, from 0 (slurmstepd died) -> null -> true -> 1 -> []
    1 -> Unable to create step for job 12: Requested nodes are busy -> Unable to create step for job 12: Requested \
nodes are busy -> 1 -> false -> 0 -> []
    143 given_up -> words -> srun started no task in 30 s -> null -> false -> 0 -> []
    137 abandoned -> words -> srun did not end within 40 s of SIGTERM, and its tasks may still run -> null -> true -> \
0 -> []
    137 -> words -> killed by SIGKILL -> null -> true -> 0 -> []""", str.split, str, str, *[json.loads] * 4))
def test_messages_of_srun(status, messages, cause, exit_code, started, rank, lost):
    end = read_end(int(status[0]), "".join(f"srun: error: {line}\n" for line in messages.split(" | ")),
                   **dict.fromkeys(status[1:], True))
    assert (end.cause, end.exit_code, end.started, end.rank, [*end.lost]) == (cause, exit_code, started, rank, lost)


@pytest.mark.parametrize("script, limit, each, expected", table("""
    exec sleep 3600 -> '' -> false -> status: 143
    exec sleep 3600 -> MAKE_S -> true -> {status: 143, given_up: true}
    echo 'srun: error: n1: task 0: Killed' >&2; touch node1.log; exec sleep 3600 -> BROKEN_S -> true -> status: 143
    trap '' TERM; touch node1.log; sleep 3600 & wait; wait -> KILL_S -> true -> {status: 137, abandoned: true}""",
    str, *[yaml.safe_load] * 3))
def test_when_a_step_is_ended(tmp_path, monkeypatch, script, limit, each, expected):
    """When it must not go on, has started no task, or one of its tasks has ended badly; one that stays is abandoned."""
    for module, name in ((srun, "MAKE_S"), (srun, "BROKEN_S"), (processes, "KILL_S")):
        monkeypatch.setattr(module, name, 0.2 if name == limit else HANG_S)
    messages = []
    end = run_step(["env", "-C", str(tmp_path), "sh", "-c", script], {"PATH": "/usr/bin:/bin"}, tmp_path,
                   lambda: each and not (limit == "KILL_S" and (tmp_path / "node1.log").exists()), messages.append)
    assert end == read_end(**{"messages": "".join(f"{line}\n" for line in messages), **expected})
    assert len(messages) == (limit == "BROKEN_S")


# ---- what a task becomes


SLURM = {"SLURM_PROCID": "13", "SLURM_NTASKS": "32", "SLURM_LOCALID": "5", "SLURM_NODEID": "1",
         "SLURM_STEP_NUM_NODES": "4", "SLURM_JOB_NUM_NODES": "9", "MASTER_ADDR": "gpu009", "MASTER_PORT": "24567",
         "SLURMD_NODENAME": "gpu010"}
ASK = ("import os, signal, sys; os.write(2, b'first\\n'); "
       "print({'mask': sorted(map(int, signal.pthread_sigmask(signal.SIG_BLOCK, ()))), "
       "'pid': os.getpid(), **{name: os.environ.get(name) for name in sys.argv[1:]}})")


def test_rank_environment():
    assert rank_environment(SLURM, "train", 32, 0) == {
        "RANK": "13", "WORLD_SIZE": "32", "LOCAL_RANK": "5", "LOCAL_WORLD_SIZE": "8", "GROUP_RANK": "1",
        "MASTER_ADDR": "gpu009", "MASTER_PORT": "24567"}


def test_what_was_not_planned_is_refused():
    short = {**SLURM, "CUDA_VISIBLE_DEVICES": "0,1"}
    for stage in ("train", "preflight"):
        said = refused(UserError, "gpu010 shows 2 of 8 GPUs to this task", rank_environment, short, stage, 32, 8)
        assert "CUDA_VISIBLE_DEVICES=0,1" in said and "gpu-bind" in said
    bare = {name: value for name, value in short.items() if name != "CUDA_VISIBLE_DEVICES"}
    refused(UserError, "gpu010 shows 0 of 8 GPUs to this task", rank_environment, bare, "train", 32, 8)
    assert rank_environment(bare, "preflight", 32, 8), "it says so"
    assert rank_environment({"SLURM_NTASKS": "1"}, "shard", 0, 0) == {}, "a stage without ranks"


@pytest.mark.parametrize("masks, own", table("""
    {"CUDA_VISIBLE_DEVICES": "0"} -> true
    {"CUDA_VISIBLE_DEVICES": "GPU-8a3f"} -> true
    {"ROCR_VISIBLE_DEVICES": "3"} -> true
    {"ROCR_VISIBLE_DEVICES": "4,5,6,7", "HIP_VISIBLE_DEVICES": "2"} -> true
    {"CUDA_VISIBLE_DEVICES": "0,1,2,3"} -> false""", *[json.loads] * 2))
def test_a_task_has_its_own_gpu_as_device_0_or_all_by_its_place(masks, own):
    for stage in ("train", "preflight"):
        found = rank_environment({**SLURM, **masks}, stage, 32, 4)
        assert (found["LOCAL_RANK"], found["LOCAL_WORLD_SIZE"]) == ("0" if own else "5", "8")


def test_the_place_of_a_rank_names_its_caches(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    found = {defaults({**SLURM, "SLURM_LOCALID": str(place), "LOCAL_RANK": "0"})["TRITON_CACHE_DIR"]
             for place in range(4)}
    assert len(found) == 4


@pytest.mark.parametrize("masks, count", table("""
    {} -> 2
    {"CUDA_VISIBLE_DEVICES": ""} -> 0
    {"CUDA_VISIBLE_DEVICES": "-1"} -> 0
    {"CUDA_VISIBLE_DEVICES": "NoDevFiles"} -> 0
    {"CUDA_VISIBLE_DEVICES": "GPU-a1,GPU-b2,GPU-c3"} -> 3
    {"ROCR_VISIBLE_DEVICES": "0,1", "HIP_VISIBLE_DEVICES": "1"} -> 1""", json.loads, int))
def test_visible_gpus(tmp_path, masks, count):
    """Of two masks the narrower holds."""
    for name in ("nvidia0", "nvidia11", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    assert visible_gpus(masks, tmp_path) == count


def rank(stage, command=(sys.executable, "-c", ASK, "RANK", "NCCL_DEBUG"), ranks=32):
    return [sys.executable, "-m", "drover.launch.job.rank", stage, str(ranks), "0", *command]


def environment():
    return {**os.environ, **SLURM, "PYTHONPATH": str(REPOSITORY)}


@pytest.mark.parametrize("stage, blocked", [
    ("train", [signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM]),
    ("evaluate", [signal.SIGUSR1, signal.SIGUSR2])])
def test_it_becomes_the_command(stage, blocked):
    process = subprocess.Popen(rank(stage), env=environment(), stdout=subprocess.PIPE, text=True)
    first, found = process.communicate()[0].splitlines()
    assert first == "first", "output and errors are in order"
    found = ast.literal_eval(found)
    assert found == {"RANK": "13", "NCCL_DEBUG": "WARN", "mask": blocked, "pid": process.pid}, "no process in between"


@pytest.mark.parametrize("command, ranks, said", [
    (["true"], 8, "error: Slurm started 32 ranks"),
    (["/no/such/program"], 32, "/no/such/program cannot be started")])
def test_a_refusal_is_one_sentence_and_exit_status_2(command, ranks, said):
    result = subprocess.run(rank("train", command, ranks), env=environment(),
                            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    assert result.returncode == 2 and result.stdout.startswith(said) and len(result.stdout.splitlines()) == 1


def test_the_stages_that_save_at_a_request_to_end_are_those_with_checkpoints():
    assert set(SAVES) == {stage.name for stage in STAGES.values() if stage.checkpoints}
