"""Evaluations beside training: what is owed, how it is submitted, and one that is done."""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from launch.slurm import evaluations
from launch.slurm.chain import ChainJob, add_job, read_chain
from launch.slurm.evaluations import Evaluations, clear, evaluate, owed, prepare
from launch.slurm.scheduler import COLUMNS
from launch.slurm.submit.sbatch import evaluation_name
from pipeline.config.loading import load_config
from pipeline.contract.manifest import Manifest, read_manifest
from pipeline.contract.run import Run
from pipeline.errors import UserError
from pipeline.files import read_json, write_json
from pipeline.records.pending_evaluations import evaluation_folder
from tests.conftest import run_stage
from tests.launch.fake_job import Job, chain_of, make_job
from tests.waiting import wait_for


def checkpoint(run: Path, step: int, complete: bool = True) -> None:
    folder = run / "train" / "checkpoints" / f"step-{step:08d}"
    folder.mkdir(parents=True)
    (folder / "piece").write_text("weights")
    if complete:
        write_json(folder / "COMPLETE.json", {})


def result(run: Path, step: int) -> None:
    Manifest("evaluate", {}, [], {}, "").write(evaluation_folder(run, step) / "evaluate")


def test_what_is_owed(tmp_path: Path) -> None:
    assert owed(tmp_path, 20) == []
    for step in (20, 40, 50, 60, 80):
        checkpoint(tmp_path, step)
    checkpoint(tmp_path, 100, complete=False)
    (tmp_path / "train/checkpoints/step-00000120.damaged").mkdir()
    assert owed(tmp_path, 20) == [20, 40, 60, 80]
    result(tmp_path, 40)
    assert owed(tmp_path, 20) == [20, 60, 80]
    assert owed(tmp_path, 20, final_step=80) == [20, 60]
    assert owed(tmp_path, 60) == [60]
    Manifest("train", {}, [], {"steps": 80}, "").write(tmp_path / "train")
    assert owed(tmp_path, 20) == [20, 60], "the last one is evaluated by the chain"


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Job:
    """A train job with checkpoints at steps 20, 40 and 60 of 100, of which every second is evaluated."""
    job = make_job(tmp_path, every_checkpoints=1)
    job.run.mkdir(parents=True)
    (job.run / "config.yaml").write_text("name: trial\ntrain: {steps: 100, warmup_steps: 3, checkpoint: "
                                         "{every_steps: 20}}\n")
    for step in (20, 30, 40):
        checkpoint(job.run, step)
    chain_of(job, "12")
    for name, value in job.environ().items():
        monkeypatch.setenv(name, value)
    job.answer("squeue", "")
    return job


def waiting(name: str) -> str:
    """What squeue says of a waiting job of that name."""
    values = {"JobArrayID": "77", "State": "PENDING", "Name": name}
    return "".join(values.get(column, "")[:width].ljust(width) for column, width in COLUMNS) + "\n"


def tried(job: Job, step: int) -> None:
    add_job(job.run, read_chain(job.run).id, ChainJob(evaluation_name("trial", step), "evaluate", "evaluation", "77"))


def test_what_is_submitted(job: Job) -> None:
    found = Evaluations(job.spec, print)
    assert found.to_submit() == [20, 40]
    job.answer("squeue", waiting(evaluation_name("trial", 20)))
    assert found.to_submit() == [40], "a job in the queue is known by its name"
    job.answer("squeue", "")
    tried(job, 40)
    assert found.to_submit() == [20, 40], "a job that is gone without a result is tried once more"
    tried(job, 40)
    assert found.to_submit() == [20], "and no more than that"
    result(job.run, 20)
    assert found.to_submit() == []


def submitted(monkeypatch: pytest.MonkeyPatch, submit: Callable[[int], str]) -> None:
    monkeypatch.setattr(evaluations, "submit_apart", lambda spec, step: submit(step))
    monkeypatch.setattr(evaluations, "EVERY_S", 0.0)


def test_it_never_holds_training_up(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()
    submitted(monkeypatch, lambda step: str(release.wait()))
    said: list[str] = []
    found = Evaluations(job.spec, said.append)
    for _ in range(20):
        found.look()  # held up, this would hang
    found.finish(patience_s=0.1)
    assert not said
    release.set()
    wait_for(lambda: len(said) >= 2)


def test_a_failure_is_said_once_and_the_other_checkpoints_go_on(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    def submit(step: int) -> str:
        if step == 20:
            raise OSError("sbatch: error: no such partition")
        tried(job, step)
        tried(job, step)
        return "78"
    submitted(monkeypatch, submit)
    said: list[str] = []
    found = Evaluations(job.spec, said.append)
    for _ in range(3):
        found.look()
        found.finish()
    assert said == ["the checkpoint of step 20 is not evaluated for now, training goes on: sbatch: error: no such "
                    "partition", "the checkpoint of step 40 is evaluated by job 78"]
    (job.folder / "squeue").unlink()
    found.finish()
    assert "Slurm does not say" in said[-1]


def test_a_submission_inherits_nothing_of_the_job(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, str] = {}

    def run(command: list[str], **options: dict[str, str]) -> subprocess.CompletedProcess[str]:
        seen.update(options["env"])
        return subprocess.CompletedProcess(command, 0, "78\n", "")
    for name in ("SLURM_CPUS_PER_TASK", "SLURM_CONF", "MASTER_PORT", "SUBMITIT_EXECUTOR"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setattr(evaluations.subprocess, "run", run)
    assert evaluations.submit_apart(job.spec, 20) == "78"
    assert "SLURM_CONF" in seen and "PATH" in seen
    assert not {"SLURM_CPUS_PER_TASK", "SLURM_JOB_ID", "MASTER_PORT", "SUBMITIT_EXECUTOR"} & seen.keys()


def test_a_checkpoint_that_is_gone(job: Job) -> None:
    config = load_config(job.run / "config.yaml", check=False).model_copy(update={"runs_dir": str(job.run.parent)})
    checkpoint(job.run, 80, complete=False)
    for step in (60, 80):
        with pytest.raises(UserError, match="not a complete checkpoint"):
            prepare(Run(config), step)


def test_where_there_are_no_hard_links(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")
    monkeypatch.setattr(os, "link", refuse)
    source, target = (folder / "checkpoints/step-00000020" for folder in (
        job.run / "train", evaluation_folder(job.run, 20) / "train"))
    evaluations._link(source, target)
    assert target.is_symlink() and (target / "COMPLETE.json").exists()
    clear(job.run, 20)
    assert not target.is_symlink() and (source / "piece").exists(), "the checkpoint itself stays"


def test_an_evaluation(fresh: Path) -> None:
    """A real one: while training may go on and remove the checkpoint, with results as of the stages themselves."""
    config = yaml.safe_load(fresh.read_text())
    config["launch"] = {"processes": 1}
    fresh.write_text(yaml.safe_dump(config))
    run_stage("train", fresh, "train.steps=8")
    run = fresh.parent / "runs/mini"
    assert owed(run, 4) == [4]
    source = run / "train/checkpoints/step-00000004"
    path = prepare(Run(load_config(fresh, ["train.steps=8"])), 4)
    linked = path.parent / "train/checkpoints/step-00000004"
    pieces = [file for file in source.rglob("*") if file.is_file()]
    assert pieces and all(file.samefile(linked / file.relative_to(source)) for file in pieces)
    shutil.rmtree(source)
    assert evaluate(run, 4) == 0
    sub = path.parent
    assert read_json(sub / "evaluate/results.json")["heldout"]["overall"]["bits_per_byte"] > 0
    converted = read_manifest(sub / "convert")
    assert converted is not None and converted.counts["checkpoint"] == "step-00000004"
    assert Run(load_config(path)).state("evaluate").kind == "done"
    assert owed(run, 4) == [] and not linked.exists() and not (sub / "convert/hf").exists()
    assert not (run / "convert").exists() and not (run / "evaluate").exists()
    assert evaluate(run, 4) == 0, "a second job for it does nothing"
