"""The train stage with sequences split over ranks: one process shows, saves and goes on from the same."""

import signal

import pytest

from pipeline.config.loading import load_config
from pipeline.contract.manifest import read_manifest
from tests.conftest import REPOSITORY, run_stage
from tests.stages.training import (
    assert_equal,
    curve,
    difference,
    events,
    lines,
    proven,
    train_and_kill,
    train_folder,
)

SETTINGS = ["train.precision=fp64", "train.steps=16", "train.micro_batch=2", "train.heldout_every=4",
            "train.sample_every=8", "train.checkpoint.every_steps=2"]


def test_a_run_splits_its_sequences_at_checkpoints_and_joins_them_again(fresh):
    """By kill -9 and by request, from one process to context groups and back, beside other layouts."""
    run_stage("train", fresh, "name=whole", *SETTINGS)
    legs = ((1, 1, signal.SIGKILL, []),
            (2, 4, signal.SIGTERM, ["parallel.cp=2"]),
            (2, 6, signal.SIGKILL, ["parallel.cp=2"]),
            (1, 9, signal.SIGKILL, []),
            (4, 12, signal.SIGKILL, ["parallel.cp=2", "parallel.tp=2"]),
            (4, 14, signal.SIGKILL, ["parallel.cp=2", "parallel.pp=2"]))
    for ranks, after, how, layout in legs:
        train_and_kill(fresh, *SETTINGS, *layout, ranks=ranks, after_step=after, how=how, log="events")
    run_stage("train", fresh, *SETTINGS)
    assert proven(fresh) and read_manifest(train_folder(fresh)).counts["restarts"] == len(legs)
    assert_equal(fresh)


@pytest.mark.parametrize("options", [[], ["train.across_documents=true", "model.sliding_window=9"]],
                         ids=["documents", "across, windows"])
def test_a_run_on_a_context_group_alone_is_that_of_one_process(fresh, options):
    run_stage("train", fresh, "name=whole", *SETTINGS, *options)
    told = run_stage("train", fresh, *SETTINGS, *options, "parallel.cp=2", ranks=2)
    assert "context parallel 2" in told.stdout and proven(fresh)
    assert [event["attention"] for event in events(fresh, "start")] == ["by_document"]
    assert_equal(fresh)


def test_what_the_long_context_configuration_says_trains_at_small_size(fresh):
    """On as many ranks as share a sequence there, with their checkpointing and positions."""
    shipped = load_config(REPOSITORY / "configs/llama3_8b_128k.yaml")
    model = [f"model.rope_scaling.factor={shipped.model.rope_scaling.factor}",
             "model.rope_scaling.original_context_length=16"]
    few = ["train.steps=4", "train.warmup_steps=1", "train.precision=fp64", *model]
    cp = shipped.parallel.cp
    spread = [f"parallel.cp={cp}", f"train.activation_checkpointing={shipped.train.activation_checkpointing}"]
    told = run_stage("train", fresh, *few, *spread, ranks=cp)
    assert f"context parallel {cp}" in told.stdout and proven(fresh)
    run_stage("train", fresh, "name=whole", *few)
    assert difference(lines(fresh), {record["step"]: record for record in curve(fresh, "whole")}) < 1e-12


def test_what_knows_no_parts_of_documents_is_refused(fresh):
    refused = run_stage("train", fresh, *SETTINGS, "parallel.cp=2", "train.attention=flex", ranks=2, expect=2)
    assert "attention 'flex' knows no context parallelism. Take auto, which is by_document here" in refused.stderr
    assert "Traceback" not in refused.stderr
