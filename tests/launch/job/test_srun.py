"""A step of ranks: what srun's words mean, and when it is ended."""

import json

import pytest
import yaml

from drover.launch import processes
from drover.launch.job import srun
from drover.launch.job.srun import read_end, run_step
from tests.refusal import table
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
