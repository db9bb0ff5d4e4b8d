"""A job's script, as sbatch gets it from submitit, run by bash: its runner, and what follows from the runner's end."""

import json
import subprocess
import sys

import pytest

from drover.pipeline.contract.state import read_attempts
from tests.conftest import REPOSITORY
from tests.launch.recorded_slurm import queue_line
from tests.refusal import table

ELEMENT = {"SLURM_JOB_ID": "24", "SLURM_ARRAY_JOB_ID": "20", "SLURM_ARRAY_TASK_ID": "3", "SLURM_RESTART_COUNT": "1"}


@pytest.fixture
def script(slurm):
    """Function: submit shard, and run the script of its job, whose id is 101; how that ended."""
    def run(*settings, **variables):
        if slurm.chain is None:
            slurm.accepted("--stage shard launch.shard.array=1", *settings)
        return subprocess.run(["/bin/bash", slurm.queue / "101"], capture_output=True, text=True, env={
            "PATH": f"{slurm.programs.folder}:/usr/bin:/bin", "PYTHONPATH": str(REPOSITORY), "SLURM_JOB_ID": "101",
            **variables})

    slurm.programs.say("scontrol")
    return run


@pytest.mark.parametrize("program, requeue, status, again", table("""
    kill -9 $$ -> true -> 137 -> true
    kill -9 $$ -> false -> 137 -> false
    kill -15 $PPID; kill -9 $$ -> true -> 137 -> false
    exit 3 -> true -> 3 -> false""", str, json.loads, int, json.loads))
def test_a_job_whose_runner_is_killed_is_queued_again(script, slurm, program, requeue, status, again):
    """Recorded, and of an array this element alone. A cancelled one is not: Slurm asks all processes to end, and kills
    those that remain."""
    python = slurm.work / "python"
    python.write_text(f'#!/bin/sh\ncase "$*" in *submitit*) {program};; esac\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    answer = script(f"launch.runner_python={python}", f"launch.requeue={requeue}", **ELEMENT)
    assert answer.returncode == status, answer
    assert slurm.programs.calls("scontrol requeue") == ["scontrol requeue 20_3"] * again
    assert [[event[name] for name in ("event", "job", "restart", "stage")] for event in read_attempts(slurm.run)] == [
        ["killed", "20_3", 1, "shard"]] * again


@pytest.fixture
def stopped(slurm):
    """The stage saves and asks to be started again."""
    slurm.programs.do("srun", f"exec {sys.executable} -c 'from pathlib import Path\n"
                      "from drover.pipeline.contract.state import write_state\n"
                      f"""start = len([*Path("{slurm.run}/logs/shard").glob("101.*")]) - 1\n"""
                      f"""write_state(Path("{slurm.run}/shard"), "preempted", again=True, attempt=start)'""")


@pytest.mark.parametrize(("lines", "status", "calls"), [
    (["RUNNING"], 1, 1), (["", "PENDING"], 0, 2)])
def test_where_scontrol_fails_the_queue_decides(script, stopped, slurm, lines, status, calls):
    """Its answer may be lost, the controller may be away for a while; a refusal is the end. An earlier start was killed
    while submitit saved its task."""
    slurm.programs.do("scontrol", "echo 'scontrol: error: not now' >&2; exit 1")
    for number, state in enumerate(lines, 1):
        (slurm.work / str(number)).write_text(queue_line("101", state) if state else "")
    slurm.programs.do("squeue", f"cat '{slurm.work}'/$(grep -c 'scontrol requeue' '{slurm.programs.folder}/calls')")
    slurm.accepted("--stage shard launch.shard.array=1")
    half = slurm.run / "launch/submitit/101_submitted.pkl.save_tmp"
    half.write_text("cut")
    answer = script()
    assert answer.returncode == status and "queueing this job again" in answer.stdout and not half.exists(), answer
    assert ("Slurm did not queue the job again" in answer.stdout) == (status == 1)
    assert "not now" in answer.stderr and len(slurm.programs.calls("scontrol requeue")) == calls
