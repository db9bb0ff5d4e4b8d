"""What a submission makes of a rehearsal."""

import json
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
train: {sequence_length: 512, batch_tokens: 4096, micro_batch: 4, precision: bf16, steps: 2, warmup_steps: 1}
"""
FITS = {"lines": ["0.1 GB on rank 0"], "fits": True, "verdict": ""}


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
    """Stands in for the process of a rehearsal: what it answers, and what it was asked."""
    monkeypatch.setattr(sys, "executable", f"{programs.folder}/python")
    return lambda script: programs.do("python", f"cat > {tmp_path}/asked\n{script}")


def test_what_follows_from_its_answer(given, rehearsal, tmp_path, capsys):
    run, options = given("launch.limits.gpu_memory_gb=0.13")
    rehearsal(f"echo words of a library; echo '{json.dumps(FITS)}'")
    rehearse_training(run, [job()], options)
    assert "rehearsal 0.1 GB on rank 0" in capsys.readouterr().out
    asked = json.loads((tmp_path / "asked").read_text())
    assert asked == {"config": options.config_path, "overrides": [*options.overrides, "model.vocab_size=2048"],
                     "ranks": 2, "gpu": True, "memory_gb": 0.13}
    for answer, said in (({**FITS, "fits": False, "verdict": "rank 0 would hold 140 MB."},
                          r"Training does not fit: rank 0 would hold 140 MB\. --no-rehearse"),
                         ({"refused": "parallel.tp=3 divides nothing"}, r"cannot run: parallel\.tp=3 divides nothing")):
        rehearsal(f"echo '{json.dumps(answer)}'")
        refused(UserError, said, rehearse_training, run, [job()], options)


@pytest.mark.parametrize("script, said", table("""
    echo '{"failed": "a shape is not known"}' -> a shape is not known. The job is submitted anyway
    echo 'first' >&2; echo 'no such file' >&2; exit 3 -> it failed (no such file)
    exit 3 -> it failed (it ended with status 3)
    exec sleep 3600 -> it took longer than 2 s"""))
def test_where_it_cannot_be_done_the_job_goes_on_and_that_is_said(given, rehearsal, capsys, monkeypatch, script, said):
    monkeypatch.setattr(rehearsing, "LIMIT_S", 2)
    rehearsal(script)
    run, options = given()
    rehearse_training(run, [job()], options)
    assert f"not done: {said}" in capsys.readouterr().out


@pytest.mark.slow
def test_a_real_one(given, capsys):
    run, options = given("launch.limits.gpu_memory_gb=0.11")
    refused(UserError, r"Training does not fit: rank 0 would hold 1\d\d MB where a GPU has 110 MB. The largest part is "
                       r"activations.* and fitting: train", rehearse_training, run, [job()], options)
    assert "MB on rank 0 at its peak: activations" in capsys.readouterr().out
