"""The train stage over pipelines of ranks: equal to one process in all that it shows, saves and goes on from."""

import signal

from pipeline.contract.manifest import read_manifest
from tests.conftest import run_stage
from tests.stages.training import assert_equal, events, proven, train_and_kill, train_folder

SETTINGS = ["train.precision=fp64", "train.steps=16", "train.micro_batch=2", "model.layers=4", "train.heldout_every=4",
            "train.sample_every=8", "train.checkpoint.every_steps=2"]
ZBV = ["parallel.pp=2", "parallel.pp_schedule=zbv", "parallel.reshard=never", "train.compile=false"]
INTERLEAVED = ["parallel.pp=2", "parallel.pp_schedule=interleaved"]


def test_stages_are_saved_under_their_own_names_and_any_layout_goes_on(fresh):
    """By kill -9 and by request, over both schedules, sharding and tensor parallelism."""
    run_stage("train", fresh, "name=whole", *SETTINGS)
    legs = ((2, 1, signal.SIGKILL, ["parallel.pp=2"]),
            (4, 4, signal.SIGTERM, INTERLEAVED),
            (2, 7, signal.SIGKILL, ["parallel.tp=2"]),
            (4, 10, signal.SIGKILL, ["parallel.pp=2", "parallel.tp=2"]),
            (3, 13, signal.SIGKILL, ["parallel.pp=3"]))
    for ranks, after, how, layout in legs:
        train_and_kill(fresh, *SETTINGS, *layout, ranks=ranks, after_step=after, how=how, log="events")
    run_stage("train", fresh, *SETTINGS)
    assert proven(fresh) and read_manifest(train_folder(fresh)).counts["restarts"] == len(legs)
    assert_equal(fresh, "mini")


def test_a_run_on_a_pipeline_alone_is_that_of_one_process(fresh):
    """In what it is judged by and shows, too. Where embeddings are tied, the first and the last stage hold copies."""
    tied = ["model.tied_embeddings=true", "train.guards.replica_hash_every=2"]
    run_stage("train", fresh, "name=whole", *SETTINGS)
    run_stage("train", fresh, "name=whole_tied", *SETTINGS, *tied)
    for name, to, ranks, *layout in (("tied", "whole_tied", 2, *INTERLEAVED, *tied), ("untied", "whole", 2, *ZBV),
                                     ("three", "whole_tied", 3, "parallel.pp=3", *tied)):
        told = run_stage("train", fresh, f"name={name}", *SETTINGS, *layout, ranks=ranks)
        assert f"pipeline parallel {ranks} (" in told.stdout and proven(fresh, name)
        assert_equal(fresh, name, to, within=1e-11)  # of one step's norm, where embeddings are tied: 1.4e-12


def test_a_copy_of_the_embedding_that_went_wrong_is_found(fresh):
    """By all stages alike, those between included, which hold none."""
    tied = ["model.tied_embeddings=true", "train.guards.replica_hash_every=2", "parallel.pp=3"]
    told = run_stage("train", fresh, *SETTINGS, *tied, ranks=3, expect=2, DROVER_FAULTS="flip:rank=2,step=4")
    assert "Training stopped in step 4: weights that must be equal to the last bit differ" in told.stderr
    assert "tok_embeddings.weight" in told.stderr and "rank 2 on" in told.stderr


def test_guards_judge_for_all_stages(fresh):
    """What is NaN on one stage is skipped on all; a spike takes all of them back."""
    guards = ["train.guards.spike=rollback", "train.guards.spike_min_history=4", *SETTINGS]
    faults = "nan:rank=1,step=3;nan:rank=0,step=5;spike:rank=1,step=11,factor=1000"
    run_stage("train", fresh, *guards, "parallel.pp=2", ranks=2, DROVER_FAULTS=faults)
    assert [event["step"] for event in events(fresh, "skip")] == [3, 5]
    assert [event["step"] for event in events(fresh, "rollback")] == [11]
    assert proven(fresh) and read_manifest(train_folder(fresh)).counts["rollbacks"] == 1


def test_what_a_pipeline_cannot_take_is_refused_with_the_numbers(fresh):
    few = run_stage("train", fresh, *SETTINGS, "parallel.pp=2", "train.micro_batch=16", ranks=2, expect=2)
    assert "as many micro-batches in a step as it has ranks, parallel.pp 2; there are 1 (" in few.stderr
    deep = run_stage("train", fresh, *SETTINGS, *INTERLEAVED, "parallel.pp_stages=3", expect=2)
    assert "6 pipeline stages (pp 2, pp_schedule interleaved) are more than model.layers 4" in deep.stderr
