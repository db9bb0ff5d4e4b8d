"""What a submission makes of a rehearsal."""

import importlib.util
from types import SimpleNamespace

import pytest
import yaml

from launch.plan import Options
from launch.rehearsing import rehearse_training, worth_rehearsing
from model.attention.sdpa import Sdpa
from pipeline.config.loading import load_config
from pipeline.errors import UserError
from tests.rehearsal.measured import MODEL

TRAIN = {"sequence_length": 512, "batch_tokens": 4096, "micro_batch": 4, "precision": "bf16", "steps": 2,
         "warmup_steps": 1}


class Counts(Sdpa):
    """Asks how many values are not 0: a shape that is known once the device has computed it."""

    def attend(self, q, k, v, prepared):
        """See Backend."""
        assert q.nonzero().shape[0] > 0
        return super().attend(q, k, v, prepared)


def job(**fields):
    """A training job on two nodes of a GPU."""
    return SimpleNamespace(**{"stage": "train", "to_run": True, "ranks": 2, "nodes": 2, "gpus_per_node": 1, **fields})


@pytest.fixture
def given(tmp_path):
    """The request for a small run, and its configuration."""
    path = tmp_path / "small.yaml"
    path.write_text(yaml.safe_dump({"name": "small", "model": MODEL, "train": TRAIN}))

    def of(*overrides):
        return load_config(str(path), list(overrides), check=False), Options("slurm", str(path), tuple(overrides))
    return of


@pytest.mark.parametrize("fields, overrides, expected", [
    ({}, [], True), ({"nodes": 1}, [], False), ({"gpus_per_node": 0}, [], False), ({"to_run": False}, [], False),
    ({"stage": "convert", "ranks": 0}, [], False), ({}, ["parallel.engine=deepspeed"], False)])
def test_it_is_done_for_training_on_gpus_of_several_nodes(given, fields, overrides, expected):
    assert worth_rehearsing(given(*overrides)[0], [job(**fields)]) is expected


def test_what_does_not_fit_is_refused_before_it_queues(given, capsys):
    config, options = given("launch.limits.gpu_memory_gb=0.13")
    with pytest.raises(UserError, match=r"Training does not fit: rank 0 would hold 1\d\d MB where a GPU has 130 MB. "
                                        r"Most of it are activations.* and fitting: train.micro_batch=2"):
        rehearse_training(config, [job()], options)
    assert "MB on rank 0 at its peak: activations" in capsys.readouterr().out


def test_what_does_not_run_is_refused(given):
    config, options = given("parallel.tp=3")
    with pytest.raises(UserError, match="does not run"):
        rehearse_training(config, [job()], options)


def test_what_says_nothing_about_the_job_does_not_hold_it_up(given, capsys):
    """A backend that waits for the device in every layer can train, slowly, and cannot be rehearsed."""
    config, options = given(f"train.attention={__name__}:Counts")
    rehearse_training(config, [job()], options)
    assert "not done: The rehearsal ends at tests/launch/test_rehearsing.py" in capsys.readouterr().out
    config, options = given("launch.limits.gpu_memory_gb=0.001")
    rehearse_training(config, [job(gpus_per_node=0)], options)
    assert "MB on rank 0 at its peak" in capsys.readouterr().out, "ranks without GPUs have no limit of GPUs"
    rehearse_training(config, [job(stage="convert")], options)
    assert "no training is to be submitted" in capsys.readouterr().out


def test_where_it_cannot_be_done_the_job_goes_on_and_that_is_said(given, capsys, monkeypatch):
    config, options = given()
    rehearse_training(config, [job()], Options("slurm", "/nowhere.yaml"))
    assert "not done: it failed (" in capsys.readouterr().out
    monkeypatch.setattr("launch.rehearsing.LIMIT_S", 0.01)
    rehearse_training(config, [job()], options)
    assert "not done: it took longer than" in capsys.readouterr().out
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    rehearse_training(config, [job()], options)
    assert "torch is not installed here" in capsys.readouterr().out
