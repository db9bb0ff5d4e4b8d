"""What a submission makes of a rehearsal."""

import sys
from types import SimpleNamespace

import pytest
import yaml

from drover.launch import rehearsing
from drover.launch.plan import Options
from drover.launch.rehearsing import rehearse_training, worth_rehearsing
from drover.pipeline.config.loading import load_config
from drover.pipeline.contract.run import Run
from drover.pipeline.core.errors import UserError
from tests.refusal import refused, table

SMALL = """
name: small
model: {dim: 256, layers: 4, heads: 8, kv_heads: 4, vocab_size: 2048, context_length: 1024}
tokenizer: {vocab_size: 2048}
train: {sequence_length: 512, batch_tokens: 4096, micro_batch: 4, precision: bf16, steps: 2, warmup_steps: 1}
"""


def job(**fields):
    """A training job on two nodes of a GPU."""
    return SimpleNamespace(**{"stage": "train", "to_run": True, "ranks": 2, "nodes": 2, "gpus_per_node": 1, **fields})


@pytest.fixture
def given(tmp_path):
    """The request for a small run, and its configuration."""
    path = tmp_path / "small.yaml"
    path.write_text(SMALL)

    def of(*overrides):
        return Run(load_config(str(path), list(overrides), check=False)), Options("slurm", str(path), tuple(overrides))
    return of


@pytest.mark.parametrize("fields, overrides, expected", table("""
    {} -> [] -> true
    {nodes: 1} -> [] -> false
    {gpus_per_node: 0} -> [] -> false
    {to_run: false} -> [] -> false
    {stage: convert} -> [] -> false
    {ranks: 0} -> [] -> false
    {} -> [parallel.engine=deepspeed] -> false""", *[yaml.safe_load] * 3))
def test_it_is_done_for_training_on_gpus_of_several_nodes(given, fields, overrides, expected):
    assert worth_rehearsing(given(*overrides)[0].config, [job(**fields)]) is expected


@pytest.fixture
def rehearsal(programs, tmp_path, monkeypatch):
    """Stands in for `drover rehearse`: what it does, and what it was given."""
    monkeypatch.setattr(sys, "executable", f"{programs.folder}/python")
    return lambda script: programs.do("python", f'echo "$*" > {tmp_path}/given\n{script}')


def test_what_follows_from_its_answer(given, rehearsal, tmp_path, capsys):
    run, options = given("launch.gpu_memory_gb=0.13")
    rehearsal("echo 'peak 0.1 GB'; echo 'memory     0.1 GB of 0.13 GB: it fits'")
    rehearse_training(run, [job()], options)
    said = capsys.readouterr().out
    assert "rehearsal peak 0.1 GB" in said and "it fits" in said
    assert (tmp_path / "given").read_text().split() == [
        "-m", "drover", "rehearse", "--config", options.config_path, "--ranks", "2", "--memory=0.13",
        *options.overrides]
    rehearsal("echo 'memory     rank 0 would hold 140 MB.'; exit 1")
    refused(UserError, r"Training does not fit: rank 0 would hold 140 MB\. --no-rehearse", rehearse_training, run,
            [job()], options)


@pytest.mark.parametrize("script, said", table("""
    echo 'first' >&2; echo 'no such file' >&2; exit 2 -> no such file. The job is submitted anyway
    exit 1 -> it ended with status 1
    exec sleep 3600 -> it took longer than 2 s"""))
def test_where_it_cannot_be_done_the_job_is_submitted(given, rehearsal, capsys, monkeypatch, script, said):
    monkeypatch.setattr(rehearsing, "LIMIT_S", 2)
    rehearsal(script)
    run, options = given()
    rehearse_training(run, [job()], options)
    assert f"not done: {said}" in capsys.readouterr().out


@pytest.mark.slow
def test_a_real_one(given, capsys):
    run, options = given("launch.gpu_memory_gb=0.11")
    refused(UserError, r"Training does not fit: rank 0 would hold 1\d\d MB where a GPU has 110 MB. The largest part is "
                       r"activations.* and fitting: train", rehearse_training, run, [job()], options)
    assert "activations" in capsys.readouterr().out
