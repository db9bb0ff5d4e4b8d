"""The train stage with another optimizer than AdamW: killed, skipped, resumed elsewhere, one's own from outside."""

from __future__ import annotations

import os
import signal

from pipeline.contract.manifest import read_manifest
from tests.conftest import environment, run_stage
from tests.stages.training import (
    curve,
    difference,
    events,
    lines,
    proven,
    run_with_faults,
    train_and_kill,
    train_folder,
)

MUON = ["train.optimizer=muon", "train.steps=16", "train.precision=fp32"]


def test_muon_goes_on_after_a_kill_to_the_bit_and_on_other_ranks_within_rounding(fresh):
    run_stage("train", fresh, "name=whole", *MUON, ranks=2)
    train_and_kill(fresh, *MUON, ranks=2, after_step=4, log="events")
    train_and_kill(fresh, *MUON, ranks=2, after_step=8, how=signal.SIGTERM)
    whole = {record["step"]: record for record in curve(fresh, "whole")}
    assert all(record == whole[record["step"]] for record in curve(fresh)), "the same ranks: the same bits"
    run_stage("train", fresh, *MUON, "parallel.tp=2", ranks=4)
    assert proven(fresh) and difference(lines(fresh), whole) < 1e-4
    assert read_manifest(train_folder(fresh)).counts["restarts"] == 2


def test_the_guards_leave_muons_updates_out(fresh):
    faults = "nan:rank=1,step=5;spike:rank=0,step=9,factor=60"
    settings = [*MUON, "train.guards.spike=skip", "train.guards.spike_min_history=4"]
    run_with_faults(fresh, faults, *settings, ranks=2)
    assert [record["step"] for record in lines(fresh) if "skipped" in record] == [5, 9]
    assert curve(fresh)[-1]["loss"] < curve(fresh)[0]["loss"] and proven(fresh)


def test_a_run_does_not_change_its_optimizer_on_the_way(fresh):
    """Its states would be missing; and it is named as what changed, before."""
    train_and_kill(fresh, *MUON, ranks=1, after_step=4, log="events")
    adamw = ["train.steps=16", "train.precision=fp32"]
    refused = run_stage("train", fresh, *adamw, expect=2)
    assert 'train.optimizer: "muon" -> absent' in refused.stderr
    refused = run_stage("train", fresh, *adamw, "--accept-drift", expect=2)
    assert "does not hold exp_avg.layers.0.attention.wq.weight, nor 27 more of" in refused.stderr
    assert "Traceback" not in refused.stderr
    run_stage("train", fresh, *MUON, "--accept-drift")  # the other one was asked for meanwhile
    assert proven(fresh) and events(fresh, "resume")


def test_an_optimizer_of_ones_own_needs_no_change_of_drover(fresh, tmp_path, monkeypatch):
    """A module beside the configuration; rejected updates are left out though torch's SGD knows nothing of them."""
    (tmp_path / "mylab.py").write_text('''
from pipeline.config.optimizers import OptimizerKind, optimizer_settings


def make(weights, config, grid):
    import torch
    from pipeline.training.optimizers.base import parameter_groups
    momentum = optimizer_settings(config.train)["momentum"]
    return torch.optim.SGD(parameter_groups(weights), lr=config.train.lr, momentum=momentum)


SGD = OptimizerKind("mylab:make", matrix_bytes=4, other_bytes=4, settings={"momentum": 0.9})
''')
    settings = ["train.optimizer=mylab:SGD", "train.lr=0.1", "train.optimizer_settings={momentum: 0.8}",
                "train.steps=16"]
    refused = run_stage("train", fresh, *settings, expect=2, cold=True)
    assert "'mylab:SGD' cannot be imported (No module named 'mylab')" in refused.stderr
    path = os.pathsep.join([environment()["PYTHONPATH"], str(tmp_path)])
    run_stage("train", fresh, *settings, cold=True, PYTHONPATH=path, DROVER_FAULTS="nan:rank=0,step=5", ranks=2)
    monkeypatch.syspath_prepend(tmp_path)  # for the audit, which reads the run's configuration here
    assert [record["step"] for record in lines(fresh) if "skipped" in record] == [5]
    assert curve(fresh)[-1]["loss"] < curve(fresh)[0]["loss"] - 0.1 and proven(fresh)
    assert events(fresh, "skip")[0]["step"] == 5
