"""Starts of the runner on a real Slurm: their logs, one file a node, in which no rank's line is lost, cut or taken for
another's; and a stage without ranks."""

import json
import sys
from dataclasses import asdict

import pytest

from drover.launch.commands import logs
from drover.launch.job.host import JobSpec
from tests.conftest import REPOSITORY
from tests.waiting import wait_for

pytestmark = pytest.mark.slow

LINES, LENGTHS = range(100), (7, 1100, 80, 1022, 3000, 1023, 0)
ENDING = "0"
"""The rank that fails, in whose log Slurm says that it ends the step."""
STAGE = f"""
import os, sys, time
from pathlib import Path
rank, there = os.environ["RANK"], Path(sys.argv[1], "there")
there.mkdir(exist_ok=True)
for number in {LINES!r}:
    print("out", number, rank * {LENGTHS!r}[number % 7])
    print("err", number, rank * {LENGTHS!r}[number % 5], file=sys.stderr)
(there / rank).touch()
while len(list(there.iterdir())) < 4:
    time.sleep(0.05)
if rank == {ENDING!r}:
    sys.exit(f"why {{rank}} ended")
time.sleep(3600)
"""
ASKED = """
import signal, sys, time
from pathlib import Path
signal.signal(signal.SIGUSR2, lambda *_: sys.exit("asked"))
signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGUSR2])
Path(sys.argv[1]).touch()
time.sleep(3600)
"""


SUBMIT = """
import json, sys
from submitit import SlurmExecutor
from drover.launch.job.host import JobSpec
from drover.launch.job.task import StageTask
executor, spec = SlurmExecutor(sys.argv[1]), JobSpec(**json.loads(sys.argv[2]))
executor.update_parameters(use_srun=False, stderr_to_stdout=True, nodes=spec.nodes,
                           ntasks_per_node=spec.tasks_per_node)
print(executor.submit(StageTask(spec)).job_id)
"""


def submit(cluster, folder, spec):
    """Submit the job of a spec; its id, and its log."""
    (folder / "run/launch").mkdir(parents=True)
    job = cluster.run(sys.executable, "-c", SUBMIT, folder, json.dumps(asdict(spec)), cwd=REPOSITORY).stdout.strip()
    return job, folder / f"{job}_0_log.out"


def test_a_stage_without_ranks_gets_the_signals_of_steps(cluster, tmp_path):
    """Such as the one before the time limit, which Slurm sends to steps alone."""
    ready = tmp_path / "ready"
    spec = JobSpec(name="x-shard", stage="shard", command=(sys.executable, "-c", ASKED, str(ready)),
                   run=f"{tmp_path}/run", chain="c", max_restarts=0)
    job, log = submit(cluster, tmp_path, spec)
    wait_for(ready.exists, lambda: log.read_text() if log.exists() else "no log")
    cluster.run("scancel", "--signal=USR2", job)
    wait_for(cluster.is_idle)
    assert "exited with exit code 1; rank 0: asked" in log.read_text()


def test_a_crash_on_two_nodes(cluster, tmp_path, capsys):
    run = tmp_path / "run"
    spec = JobSpec(name="x-evaluate", stage="evaluate", command=(sys.executable, "-c", STAGE, str(tmp_path)),
                   environment={"PYTHONUNBUFFERED": "1"}, run=str(run), chain="c", ranks=4, nodes=2,
                   tasks_per_node=2, max_restarts=0)
    _, log = submit(cluster, tmp_path, spec)
    wait_for(cluster.is_idle)
    assert f"exited with exit code 1; rank {ENDING}: why {ENDING} ended" in log.read_text()
    folder, = (run / "logs/evaluate").glob("*.?")
    assert {path.name for path in folder.iterdir()} == {"node0.log", "node1.log", "srun.err"}
    for rank in range(4):
        assert logs([str(run), "evaluate", "--rank", str(rank)]) == 0
        header, *lines = capsys.readouterr().out.splitlines()
        assert header == f"==> {folder}/node{rank // 2}.log <=="
        assert [line for line in lines if "slurmstepd" not in line] == [
            f"{what} {number} {str(rank) * LENGTHS[number % most]}" for number in LINES
            for what, most in (("out", 7), ("err", 5))] + [f"why {rank} ended"] * (str(rank) == ENDING)
