"""The logs of a start on a real Slurm: one file a node, in which no rank's line is lost, cut or taken for another's."""

from __future__ import annotations

import sys

import pytest

from launch.slurm.control import logs
from launch.slurm.jobspec import JobSpec
from tests.conftest import REPOSITORY

pytestmark = pytest.mark.slow

LINES, LENGTHS = range(100), (7, 1100, 80, 1022, 3000, 1023, 0)
ENDING = "30"
"""The rank that fails in each start."""
STAGE = f"""
import os, sys, time
from pathlib import Path
rank, there = os.environ["RANK"], Path(sys.argv[1], os.environ["DROVER_ATTEMPT"])
there.mkdir(exist_ok=True)
for number in {LINES!r}:
    print("out", number, rank * {LENGTHS!r}[number % 7])
    print("err", number, rank * {LENGTHS!r}[number % 5], file=sys.stderr)
(there / rank).touch()
while len(list(there.iterdir())) < 4:
    time.sleep(0.05)
if rank == {ENDING!r}[int(there.name)]:
    sys.exit(f"why {{rank}} ended")
time.sleep(3600)
"""


def test_crashes_on_two_nodes(cluster, tmp_path, capsys):
    run = tmp_path / "run"
    (run / "launch").mkdir(parents=True)
    JobSpec(name="x-evaluate", stage="evaluate", command=(sys.executable, "-c", STAGE, str(tmp_path)), run=str(run),
            environment={"PYTHONUNBUFFERED": "1"}, chain="c", ranks=4, nodes=2, tasks_per_node=2, max_restarts=1,
            ).save(tmp_path / "spec.json")
    cluster.run("sbatch", "--wait", "--nodes=2", "--ntasks-per-node=2", f"--output={tmp_path}/log", "--wrap",
                f"{sys.executable} -m launch.slurm.job.runner {tmp_path}/spec.json", check=False, cwd=REPOSITORY)
    said, starts = (tmp_path / "log").read_text(), sorted((run / "logs/evaluate").glob("*.?"))
    assert len(starts) == 2
    latest = run / "logs/evaluate/latest"
    for folder, ending in zip(starts, ENDING, strict=True):
        latest.unlink()
        latest.symlink_to(folder.name)
        assert f"exited with exit code 1; rank {ending}: why {ending} ended" in said, said
        assert f"  rank {ending}: why {ending} ended\n" in said, said
        assert {path.name for path in folder.iterdir()} == {"node0.log", "node1.log", "srun.err"}
        for rank in range(4):
            assert logs(run, "evaluate", rank) == 0
            header, *lines = capsys.readouterr().out.splitlines()
            assert header == f"==> {folder}/node{rank // 2}.log <=="
            assert [line for line in lines if "slurmstepd" not in line] == [
                f"{what} {number} {str(rank) * LENGTHS[number % most]}" for number in LINES
                for what, most in (("out", 7), ("err", 5))] + [f"why {rank} ended"] * (str(rank) == ending)
