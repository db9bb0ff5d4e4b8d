"""What was submitted, run by hand: without Slurm, this is how far a chain of jobs can be tried."""

from __future__ import annotations

import os
import shutil
import subprocess

from launch.slurm.chain import read_chain
from pipeline.contract.manifest import read_manifest
from pipeline.contract.state import read_attempts
from tests.launch.fake_job import make_job
from tests.launch.launcher import SBATCH


def test_the_scripts_that_were_submitted_do_the_chain(ready, tmp_path):
    """From sbatch's script over the check of what it runs, submitit, the runner and ranks, to the stages."""
    shutil.rmtree(ready.run / "encode")
    tools, queue = make_job(tmp_path / "job").folder / "bin", tmp_path / "queue"
    (tools / "sbatch").write_text(SBATCH)
    (tools / "sbatch").chmod(0o755)
    queue.mkdir()
    ready.environment = {"PATH": f"{tools}:{os.environ['PATH']}", "QUEUE": str(queue)}
    result = ready.submit("--stage", "encode,train", "launch.preflight=false")
    assert result.returncode == 0 and not ready.started(), result.stderr
    (ready.root / "launch/slurm/job/runner.py").write_text("raise SystemExit('edited after the submission')\n")
    chain = read_chain(ready.run)
    assert [(job.stage, job.dependencies) for job in chain.jobs] == [
        ("encode", ()), ("train", ("101",))]
    for job in chain.jobs:
        done = subprocess.run(["bash", queue / job.id], cwd=ready.work, capture_output=True, text=True, check=False,
                              env=ready.environ(SLURM_JOB_ID=job.id, SLURM_JOB_NODELIST="localhost", SLURM_NTASKS="2",
                                                SLURM_JOB_NUM_NODES="1", SLURM_NODEID="0", SLURM_PROCID="0",
                                                SLURM_LOCALID="0"))
        assert done.returncode == 0 and f"{job.stage} is done" in done.stdout, done.stdout + done.stderr
        assert read_manifest(ready.run / job.stage) is not None
    assert ready.started() == ["encode-0", "train-0", "train-1"]
    assert [(event["job"], event["status"]) for event in read_attempts(ready.run) if event["event"] == "ended"] == [
        ("101", "done"), ("102", "done")]
