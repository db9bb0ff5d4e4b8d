"""Continued pretraining: a run that starts from another's weights, under every engine, from a checkpoint or export."""

import shutil

import pytest

from launch.submit import main as submit
from tests.conftest import run_stage
from tests.stages.training import curve, difference, events, lines, proven, reusing, run_with_faults, train_folder


@pytest.fixture(scope="module")
def first(tmp_path_factory, encoded):
    """The run whose weights are taken; it has done 8 steps."""
    path = reusing(encoded, tmp_path_factory.mktemp("first"))
    run_stage("train", path, "name=first", "train.precision=fp64", "train.steps=8")
    return train_folder(path, "first").parent


@pytest.mark.slow
def test_after_a_kill_it_goes_on_from_its_own_weights_on_a_longer_context(fresh, first):
    settings = [f"train.init_from={first}", "train.precision=fp64", "model.context_length=256", "model.rope_theta=1e6",
                "train.sequence_length=128"]
    told = run_stage("train", fresh, "name=whole", *settings).stdout
    assert "; context_length 128 -> 256; rope_theta 500000.0 -> 1000000.0" in told
    run_with_faults(fresh, "kill:rank=0,step=7", *settings, "train.checkpoint.background=false", expect=-9)
    run_stage("train", fresh, *settings)
    whole = {record["step"]: record for record in curve(fresh, "whole")}
    assert events(fresh, "resume") and difference(lines(fresh), whole) == 0.0 and proven(fresh)


def test_other_weights_make_it_stale_wherever_they_lie_and_other_shapes_are_refused(fresh, first, tmp_path, capsys):
    copy, moved, short = tmp_path / "copy", tmp_path / "moved", ["train.steps=2", "train.warmup_steps=0"]
    shutil.copytree(first, copy)
    run_stage("train", fresh, f"train.init_from={copy}", *short)
    (copy / "train/checkpoints/step-00000008").rename(moved)
    again = run_stage("train", fresh, f"train.init_from={moved}", *short)
    assert "up to date" in again.stdout or "nothing to do" in again.stdout
    refused = run_stage("train", fresh, *short, f"train.init_from={copy}", expect=2).stderr  # now of step 4
    assert "init_from/COMPLETE.json" in refused and "Traceback" not in refused
    assert submit(["--stage", "train", "--config", str(fresh), "--dry-run", "name=before", "model.layers=3",
                   f"train.init_from={first}", "model.qk_norm=true", "model.sliding_window=8"]) == 2
    told = capsys.readouterr().err
    for text in ("layers is 3 here, 2 there", "qk_norm is True here, False there",
                 "sliding_window is 8 here, None there"):
        assert text in told
    assert not train_folder(fresh, "before").parent.exists()
