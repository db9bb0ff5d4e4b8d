"""The train stage with another optimizer than AdamW: killed, skipped, resumed elsewhere, one's own from outside."""

from __future__ import annotations

import signal

from pipeline.contract.manifest import read_manifest
from tests.conftest import run_stage
from tests.stages.training import (
    curve,
    difference,
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
