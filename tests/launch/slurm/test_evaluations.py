"""Evaluations beside training: what is owed, how it is submitted, and one that is done."""

from dataclasses import replace

import pytest
import yaml

from drover.launch.slurm import evaluations
from drover.launch.slurm.chain import ChainJob, add_job
from drover.launch.slurm.evaluations import Evaluations, evaluate, main, prepare
from drover.launch.slurm.scheduler import JobInfo
from drover.pipeline.config.loading import load_config
from drover.pipeline.config.plugins import loaded_plugins
from drover.pipeline.contract.manifest import Manifest, read_manifest
from drover.pipeline.contract.run import Run
from drover.pipeline.contract.stages import STAGES
from drover.pipeline.core.errors import UserError
from drover.pipeline.core.files import output_record, sha256_file, write_json, write_text
from drover.pipeline.records.checkpoints import TrainingProgress
from drover.pipeline.records.pending_evaluations import evaluation_folder
from tests.launch.fake_job import chain_of, make_job
from tests.refusal import refused


def checkpoint(run, step):
    folder = run / f"train/checkpoints/step-{step:08d}"
    write_text(folder / "inner/piece", "weights")
    progress = vars(TrainingProgress(step=step, samples=8, tokens=512, precision="fp32"))
    write_json(folder / "COMPLETE.json", {"format": 2, "progress": progress, "world_size": 2,
                                          "files": [output_record(folder, folder / "inner/piece")]})


def result(run, step):
    Manifest("evaluate", {}, [], {}, "").write(evaluation_folder(run, step) / "evaluate")


@pytest.fixture
def queued(monkeypatch):
    """Comments of the jobs in the queue."""
    comments = []

    class Queue:
        def mine(self):
            return None if "silent" in comments else [
                JobInfo("77", "PENDING", name=comment.rpartition(":")[2], comment=comment) for comment in comments]

    monkeypatch.setattr(evaluations, "Scheduler", Queue)
    return comments


@pytest.fixture
def job(tmp_path, queued):
    """A train job with checkpoints at steps 20, 30, 40 and 100 of 100, of which every second is evaluated, an
    incomplete and a damaged one."""
    config = tmp_path / "runs/trial/config.yaml"
    job = make_job(tmp_path, every_checkpoints=1)
    config.write_text(f"""
name: trial
runs_dir: {job.run.parent}
train: {{steps: 100, warmup_steps: 3, checkpoint: {{every_steps: 20}}}}
launch: {{evaluate: {{every_checkpoints: 1}}}}
""")
    job.spec = replace(job.spec, files={str(config): sha256_file(config)})
    for step in (20, 30, 40, 60, 100):
        checkpoint(job.run, step)
    (job.run / "train/checkpoints/step-00000060/COMPLETE.json").unlink()
    (job.run / "train/checkpoints/step-00000080.damaged").mkdir()
    chain_of(job, "12")
    return job


def name_of(step):
    return f"trial-evaluate-step-{step:08d}"


def steps(found):
    return [int(job.command[job.command.index("--step") + 1]) for job in found.to_submit()]


def tried(job, step):
    add_job(job.run, "c", ChainJob(name_of(step), "evaluate", "evaluation", "77"))


def test_what_is_submitted(job, queued):
    found = Evaluations(job.spec, print)
    assert steps(found) == [20, 40]
    queued += [name_of(20), f"drover:other:{name_of(20)}", f"drover:other:{name_of(40)} ours"]
    assert steps(found) == [20, 40], "jobs of another folder's run of the same name"
    queued += [f"drover:c:{name_of(20)} ours"]
    assert steps(found) == [40], "a job in the queue is known by its token"
    queued.clear()
    tried(job, 40)
    assert steps(found) == [20, 40], "a job that is gone without a result is tried once more"
    tried(job, 40)
    assert steps(found) == [20], "and no more than that"
    result(job.run, 20)
    assert steps(found) == []


def test_a_failure_is_said_once_and_the_other_checkpoints_go_on(job, monkeypatch, queued):
    def submit(self, wanted):
        step = int(wanted.name[-8:])
        if step == 20:
            raise OSError("sbatch: error: no such partition")
        tried(job, step)
        tried(job, step)
        return "78"

    monkeypatch.setattr(Evaluations, "submit", submit)
    monkeypatch.setattr(evaluations, "EVERY_S", 0.0)
    said = []
    found = Evaluations(job.spec, said.append)
    for _ in range(3):
        found.look()
        found.finish()
    assert said == ["the checkpoint of step 20 is not evaluated for now, training continues: sbatch: error: no such "
                    "partition", "the checkpoint of step 40 is evaluated by job 78"]
    queued.append("silent")
    found.finish()
    assert "squeue does not answer" in said[-1]


def test_a_checkpoint_that_is_gone(job):
    for step in (60, 80):
        refused(UserError, "not a complete checkpoint", prepare,
                Run(load_config(job.run / "config.yaml", check=False)), step)
    assert main(["--run", str(job.run), "--step", "60"]) == 2


def play_data_stages(job, monkeypatch):
    """What an evaluation needs of the stages before it."""
    for stage in ("shard", "tokenizer", "encode"):
        Manifest(stage, {"config": {}, "inputs": {}, "files": {}}, [], {"vocab_size": 512}, "").write(job.run / stage)
    monkeypatch.setitem(STAGES, "train", replace(STAGES["train"], functions={}))


@pytest.mark.parametrize("played, status", [("true", 1), ("kill -9 $$", 137), ("true", 0)])
def test_what_is_evaluated_and_cleared(job, monkeypatch, played, status):
    """The stages themselves are played: without a result, killed, and well."""
    play_data_stages(job, monkeypatch)
    folder = evaluation_folder(job.run, 20)

    def stages(config, path):
        if not status:
            (folder / "convert/hf").mkdir(parents=True)
            result(job.run, 20)
        return [(["sh", "-c", played], 0)]

    monkeypatch.setattr(evaluations, "commands", stages)
    name = "checkpoints/step-00000020"
    assert evaluate(job.run, 20) == status
    config, made = load_config(folder / "config.yaml"), read_manifest(folder / "train")
    assert (config.name, config.reuse, config.convert.copy_to) == (folder.name, str(job.run), None)
    assert (made.counts["checkpoint"], made.counts["vocab_size"]) == (name, 512)
    assert [record["path"] for record in made.outputs] == [f"{name}/inner/piece", f"{name}/COMPLETE.json"]
    assert (job.run / "train" / name).exists() and (folder / "train" / name).exists() == (status != 0)
    assert not (folder / "convert/hf").exists()
    assert status or evaluate(job.run, 20) == 0, "a second job for it does nothing"


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.usefixtures("no_plugins")
def test_an_evaluation_imports_the_plugins_that_its_user_named(job, monkeypatch, named):
    """The configuration that its stages get names these, and no others that the run folder names."""
    plugin = job.run.parent / "evaluated_with.py"
    plugin.write_text("")
    with open(job.run / "config.yaml", "a") as config:
        config.write(f"plugins: [{plugin}]\n")
    play_data_stages(job, monkeypatch)
    monkeypatch.setattr(evaluations, "commands", lambda config, path: [])
    main(["--run", str(job.run), "--step", "20", *["--plugin", str(plugin)] * named])
    prepared = yaml.safe_load((evaluation_folder(job.run, 20) / "config.yaml").read_text())
    assert prepared["plugins"] == [*map(str, loaded_plugins().values())] == [str(plugin)] * named
