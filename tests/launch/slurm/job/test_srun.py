"""A step of ranks: what srun's words mean, and when it is ended."""

import re

import pytest
import yaml

from drover.launch import processes
from drover.launch.slurm.job import srun
from drover.launch.slurm.job.srun import read_end, run_step
from tests.launch.fake_job import KILLED, NO_STEP
from tests.refusal import table
from tests.waiting import HANG_S

LOST = "srun: error: Node failure on n3\nsrun: error: Task launch for StepId=1.0 failed on node n4: Socket timed out\n"
VANISHED = f"{KILLED}srun: error: step_launch_notify_io_failure: aborting, io error with missing step on node 1\n"


@pytest.mark.parametrize("end, cause, exit_code, started", [
    (read_end(143, KILLED), "rank 1 on n2: killed", None, True),
    (read_end(143, "srun: error: n1: tasks 0-1: Terminated\nsrun: error: n2: task 3: Exited with exit code 2\n"),
     "rank 3 on n2: exited with exit code 2", 2, True),
    (read_end(143, "srun: error: n1: tasks 4,6: Exited with exit code 143\n"),
     "ranks 4,6 on n1: exited with exit code 143", 143, True),
    (read_end(143, f"{KILLED}{LOST}{LOST}"), "lost n3, n4", None, True),
    (read_end(143, VANISHED), "Slurm lost the tasks of the step's node number 1, from 0 (slurmstepd died)", None, True),
    (read_end(1, NO_STEP), "Unable to create step for job 12: Requested nodes are busy", 1, False),
    (read_end(143, "", given_up=True), "srun started no task in 30 s", None, False),
    (read_end(137, "", abandoned=True), "srun did not end within 40 s of SIGTERM, and its tasks may still run",
     None, True),
    (read_end(137, ""), "killed by SIGKILL", None, True),
    (read_end(182, ""), "", None, True),  # srun's own, although 182 is 128 + 54
    (read_end(0, ""), "", None, True)])
def test_what_srun_said(end, cause, exit_code, started):
    assert (end.cause, end.exit_code, end.started) == (cause, exit_code, started)
    assert end.lost == (("n3", "n4") if cause.startswith("lost") else ())
    assert end.rank == (int(found[1]) if (found := re.match(r"ranks? (\d)", cause)) else end.rank)


@pytest.mark.parametrize(("script", "limit", "each", "expected"), table("""
    exec sleep 3600 -> '' -> false -> status: 143
    exec sleep 3600 -> MAKE_S -> true -> {status: 143, given_up: true}
    echo 'srun: error: n1: task 0: Killed' >&2; touch node1.log; exec sleep 3600 -> BROKEN_S -> true -> status: 143
    trap '' TERM; touch node1.log; sleep 3600 & wait; wait -> KILL_S -> true -> {status: 137, abandoned: true}""",
    str, *[yaml.safe_load] * 3))
def test_when_a_step_is_ended(tmp_path, monkeypatch, script, limit, each, expected):
    """When it must not go on, has started no task, or one of its tasks has ended badly; one that stays is abandoned."""
    for module, name in ((srun, "MAKE_S"), (srun, "BROKEN_S"), (processes, "KILL_S")):
        monkeypatch.setattr(module, name, 0.2 if name == limit else HANG_S)
    said = []
    end = run_step(["env", "-C", str(tmp_path), "sh", "-c", script], {"PATH": "/usr/bin:/bin"}, tmp_path,
                   lambda: each and not (limit == "KILL_S" and (tmp_path / "node1.log").exists()), said.append)
    assert end == read_end(**{"said": "".join(f"{line}\n" for line in said), **expected})
    assert len(said) == (limit == "BROKEN_S")
