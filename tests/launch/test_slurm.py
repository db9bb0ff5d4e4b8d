"""Slurm: the text that sbatch gets, the chain, and what a task becomes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from launch.worker import PORTS, RunStage, rank_environment
from pipeline.stages import STAGES
from tests.launch.fake_house import House

SBATCH = """#!/bin/sh
n=$(($(ls "$FAKE_SLURM" | wc -l) + 101))
[ "$n" = "$REFUSED" ] && { echo "sbatch: error: invalid partition" >&2; exit 1; }
cp "$1" "$FAKE_SLURM/$n"
echo "Submitted batch job $n"
"""

SRUN = """#!/usr/bin/env python3
import os, subprocess, sys
options = [argument for argument in sys.argv[1:] if argument.startswith("--cpus-per-task") or "kill-on" in argument]
assert len(options) == 2, sys.argv
start = sys.argv.index(next(argument for argument in sys.argv if argument.endswith("python") or "/python" in argument))
tasks, nodes = int(os.environ["TASKS"]), int(os.environ["NODES"])
running = [subprocess.Popen(sys.argv[start:], env={**os.environ, "SLURM_PROCID": str(task), "SLURM_NTASKS": str(tasks),
    "SLURM_LOCALID": str(task // nodes), "SLURM_NODEID": str(task % nodes), "SLURM_JOB_NUM_NODES": str(nodes)})
    for task in range(tasks)]
sys.exit(max(abs(process.wait()) for process in running))
"""

TRAIN_ON_FOUR_NODES = """#!/bin/bash

# Parameters
#SBATCH --account=physics
#SBATCH --chdir='{work}'
#SBATCH --cpus-per-task=6
#SBATCH --dependency=afterok:ID_OF_encode
#SBATCH --error='{work}/runs/trial/logs/slurm/%j_0_log.err'
#SBATCH --gpus-per-node=8
#SBATCH --job-name=trial-train
#SBATCH --kill-on-invalid-dep=yes
#SBATCH --mem=500GB
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=8
#SBATCH --open-mode=append
#SBATCH --output='{work}/runs/trial/logs/slurm/%j_0_log.out'
#SBATCH --partition=gpu
#SBATCH --signal=TERM@120
#SBATCH --time=600
#SBATCH --wckey=submitit

# setup
module load cuda
export PYTHONPATH={root}${{PYTHONPATH:+:$PYTHONPATH}}
export PYTHONSAFEPATH=1 PYTHONUNBUFFERED=1

# command
export SUBMITIT_EXECUTOR=slurm
srun --unbuffered --output '{work}/runs/trial/logs/slurm/%j_%t_log.out' \
--error '{work}/runs/trial/logs/slurm/%j_%t_log.err' --cpus-per-task=6 --kill-on-bad-exit=1 \
{python} -u -m submitit.core._submit '{work}/runs/trial/logs/slurm'
"""


@pytest.fixture
def slurm(house: House) -> Path:
    """Put a fake sbatch and srun on the launcher's PATH; the folder holds the scripts by job id."""
    tools, queue = house.work / "bin", house.work / "queue"
    tools.mkdir()
    queue.mkdir()
    for name, text in (("sbatch", SBATCH), ("srun", SRUN)):
        (tools / name).write_text(text)
        (tools / name).chmod(0o755)
    house.environment = {"PATH": f"{tools}:{os.environ['PATH']}", "FAKE_SLURM": str(queue)}
    return queue


def scripts(text: str) -> dict[str, str]:
    """The scripts of a dry run by stage."""
    found = {}
    for part in text.split("# ---- ")[1:]:
        found[part.partition(":")[0]] = part[part.index("#!/bin/bash"):].rstrip("\n") + "\n"
    return found


def test_dry_run_on_four_nodes(house: House) -> None:
    result = house.submit(
        "--stage", "all", "--nodes", "4", "--gpus-per-node", "8", "--dry-run", "launch.cpus_per_task=6",
        "launch.partition=gpu", "launch.account=physics", "launch.memory_gb=500", "launch.time_minutes=600",
        "launch.setup=[module load cuda]", "train.micro_batch=1")
    assert result.returncode == 0, result.stderr
    assert not house.run.exists(), "a dry run writes nothing"
    found = scripts(result.stdout)
    assert list(found) == list(STAGES)
    golden = TRAIN_ON_FOUR_NODES.format(work=house.work, root=house.root, python=sys.executable)
    assert found["train"] == golden
    for before, stage in zip([None, *STAGES], STAGES, strict=False):
        dependency = f"#SBATCH --dependency=afterok:ID_OF_{before}\n"
        assert (dependency in found[stage]) == (before is not None)
        subprocess.run(["bash", "-n"], input=found[stage], text=True, check=True)
    assert "#SBATCH --nodes=1\n" in found["evaluate"] and "--gpus-per-node=8" in found["evaluate"]
    assert "--gpus-per-node" not in found["shard"] and "#SBATCH --ntasks-per-node=1\n" in found["shard"]
    assert "32 ranks x 6 threads on 4 nodes of 8 GPUs and 48 cores" in result.stdout
    assert "600 min a job, 500 GB a node" in result.stdout


def test_ranks_are_checked_for_the_planned_nodes(house: House) -> None:
    result = house.submit("--stage", "all", "--nodes", "3", "--dry-run")
    assert result.returncode == 2
    assert "not divisible by 24 (train.micro_batch 4 x 6 data-parallel ranks)" in result.stderr


def test_submission_chains_what_is_not_done(house: House, slurm: Path) -> None:
    house.submit("--stage", "shard", "--cluster", "local")
    house.forget()
    result = house.submit("--stage", "all")
    assert result.returncode == 0, result.stderr
    assert not house.started()
    chain = json.loads((house.run / "launch" / "chain.json").read_text())
    assert [(job["stage"], job["id"], job["dependencies"]) for job in chain["jobs"]] == [
        ("tokenizer", "101", []), ("encode", "102", ["101"]), ("train", "103", ["102"]), ("convert", "104", ["103"]),
        ("evaluate", "105", ["104"]), ("report", "106", ["105"])]
    assert "#SBATCH --dependency=afterok:105\n" in (slurm / "106").read_text()
    assert "#SBATCH --kill-on-invalid-dep=yes\n" in (slurm / "106").read_text()
    assert "encode    job 102 after 101" in result.stdout and "runs/trial/logs/slurm" in result.stdout
    for job in chain["jobs"]:
        assert Path(job["script"]).read_text() == (slurm / job["id"]).read_text()


def run_job(house: House, queue: Path, job: str, **more: str) -> subprocess.CompletedProcess[str]:
    """Do what Slurm does with a submitted script."""
    nodes = {"nodes": "1", "ntasks-per-node": "1"}
    for line in (queue / job).read_text().splitlines():
        name, _, value = line.removeprefix("#SBATCH --").partition("=")
        nodes.update({name: value} if name in nodes else {})
    environment = house.environ(
        SLURM_JOB_ID=job, SLURM_JOB_NODELIST=f"node[007-{6 + int(nodes['nodes']):03d}]", NODES=nodes["nodes"],
        TASKS=str(int(nodes["nodes"]) * int(nodes["ntasks-per-node"])), **more)
    return subprocess.run(["bash", str(queue / job)], cwd=house.work, env=environment, capture_output=True, text=True,
                          timeout=120, check=False)


def test_the_jobs_do_the_stages(house: House, slurm: Path) -> None:
    submitted = house.submit("--stage", "shard,tokenizer,encode,train", "--nodes", "2", "train.steps=40",
                             "launch.processes=1")
    assert submitted.returncode == 0, submitted.stderr
    (house.work / "config.yaml").write_text("name: trial\ntrain: {steps: 7}\n")  # edited while the jobs wait
    train_too_soon = run_job(house, slurm, "104")
    assert train_too_soon.returncode != 0 and not house.started()
    outputs = [run_job(house, slurm, job) for job in ("101", "102", "103", "104")]
    assert [result.returncode for result in outputs] == [0, 0, 0, 0], outputs[-1].stderr
    assert "train rank 0 of 2 threads 4" in outputs[-1].stdout
    manifest = json.loads((house.run / "train" / "manifest.json").read_text())
    assert manifest["fingerprint"]["config"]["train"]["steps"] == 40, "the settings are those of the submission"
    assert manifest["execution"]["world_size"] == 2


def test_a_requeued_job_does_not_start_afresh(house: House, slurm: Path) -> None:
    house.submit("--stage", "shard", "--cluster", "local")
    house.submit("--stage", "shard", "--force")
    house.forget()
    assert run_job(house, slurm, "101", SLURM_RESTART_COUNT="1").returncode == 0
    assert not house.started(), "it was done"
    assert run_job(house, slurm, "101").returncode == 0
    assert house.started() == ["shard-0"]


def test_a_refused_submission_says_what_is_queued(house: House, slurm: Path) -> None:
    result = house.submit("--stage", "all", REFUSED="103")
    assert result.returncode == 2
    assert "trial-encode" in result.stderr and "invalid partition" in result.stderr
    assert "scancel 101 102" in result.stderr and "Traceback" not in result.stderr


def test_nothing_to_submit(house: House, slurm: Path) -> None:
    house.submit("--stage", "shard", "--cluster", "local")
    result = house.submit("--stage", "shard")
    assert result.returncode == 0 and "nothing to submit" in result.stdout and not list(slurm.iterdir())


def test_rank_environment() -> None:
    slurm = {"SLURM_PROCID": "13", "SLURM_NTASKS": "32", "SLURM_LOCALID": "5", "SLURM_NODEID": "1",
             "SLURM_JOB_NUM_NODES": "4", "SLURM_JOB_NODELIST": "gpu[009-010,12],other3", "SLURM_JOB_ID": "1234567"}
    assert rank_environment(slurm) == {
        "RANK": "13", "WORLD_SIZE": "32", "LOCAL_RANK": "5", "LOCAL_WORLD_SIZE": "8", "GROUP_RANK": "1",
        "MASTER_ADDR": "gpu009", "MASTER_PORT": "24567"}
    assert PORTS.stop <= 32768, "below the kernel's own range"


def test_a_task_becomes_the_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[tuple[str, list[str], dict[str, str]]] = []
    monkeypatch.setattr(os, "execvpe", lambda *arguments: called.append(arguments))
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    RunStage(("python", "-m", "x", "--force"), {"OMP_NUM_THREADS": "8", "EXTRA": "1"}, ranks=False)()
    monkeypatch.setenv("SLURM_RESTART_COUNT", "2")
    RunStage(("python", "-m", "x", "--force"), {}, ranks=False)()
    assert called[0][1] == ["python", "-m", "x", "--force"] and called[1][1] == ["python", "-m", "x"]
    assert called[0][2]["OMP_NUM_THREADS"] == "3" and called[0][2]["EXTRA"] == "1" and "RANK" not in called[0][2]
