"""What goes wrong while training is noticed and dealt with: faults are injected into real runs."""

import os
import re
import shutil
import time

import pytest

from drover.pipeline.contract.state import read_attempts
from drover.pipeline.records.hangs import hang_folder, judge_hang, read_hang
from drover.pipeline.records.metrics import read_metrics
from tests.conftest import run_python
from tests.faulty import HOOKS, LATE
from tests.stages.training import (
    assert_equal_to_the_bit,
    curve,
    difference,
    events,
    lines,
    manifest_of,
    proven,
    run_train,
    run_with_faults,
    train_folder,
)

ROLLBACK = ["train.steps=24", "train.validation_every=100", "train.sample_every=100", "train.guards.spike=rollback",
            "train.guards.spike_min_history=8"]


def test_bad_steps_are_skipped_and_left_out_over_a_kill(fresh, encoded):
    """A NaN is skipped; two spikes are gone back from; in between a rank is killed. The curve that is left is that of
    a run that never saw what the rollbacks left out, to the last bit, although that one reads the result of each step
    at once, and this one in the next step, as on a GPU."""
    nan = "nan:rank=1,step=3,again=1"
    faults = f"{nan};spike:rank=0,step=11,factor=50;kill:rank=1,step=15;spike:rank=1,step=18,factor=80"
    run_with_faults(fresh, faults, *ROLLBACK, ranks=2, expect=1, **{LATE: "1"})
    output = run_with_faults(fresh, faults, *ROLLBACK, ranks=2, **{LATE: "1"}).stdout
    assert proven(fresh)
    counts = manifest_of(fresh).counts
    assert (counts["skipped"], counts["rollbacks"], counts["restarts"], counts["samples"]) == (1, 2, 1, 26 * 16)
    assert [phase["left_out"] for phase in counts["phases"]] == [{"all sources": 2 * 16 * 64}]
    tokens = manifest_of(encoded, "encode").counts["splits"]["train"]["code"]["tokens"]
    assert counts["epochs"]["all sources"] == pytest.approx(24 * 16 * 64 / tokens)
    skip, = events(fresh, "skip")
    assert skip["step"] == 3 and skip["samples"] == [[32, 48]] and skip["documents"][0]["key"]
    assert "is a spike against a median of" in output and "Documents: code/" in output
    clean = train_folder(fresh, "clean")
    clean.mkdir(parents=True)
    shutil.copy(train_folder(fresh) / "rollbacks.json", clean)
    run_with_faults(fresh, nan, "name=clean", *ROLLBACK, ranks=2)
    metrics = read_metrics(train_folder(fresh) / "metrics.jsonl")
    assert [record["hook_steps"] for record in metrics] == [record["step"] for record in metrics], "its state was kept"
    assert_equal_to_the_bit(fresh, to="clean")
    assert curve(fresh)[2]["loss"] == "nan"


def test_training_whose_every_update_was_skipped_is_not_done(fresh):
    faults = ";".join(f"nan:rank=0,step={step}" for step in (1, 2, 3))
    settings = ("train.steps=3", "train.warmup_steps=1")
    assert "All 3 updates were skipped, so nothing was learned" in run_with_faults(
        fresh, faults, *settings, ranks=1, expect=2).stderr
    assert "All 3 updates were skipped" in run_train(fresh, *settings, expect=2).stderr
    assert manifest_of(fresh) is None


@pytest.mark.slow
@pytest.mark.parametrize("stage", [2, 3])
def test_deepspeed_skips_what_fsdp2_skips(fresh, stage):
    """Skipped updates leave weights and moments as they were, also where DeepSpeed calls the optimizer."""
    settings = ["train.guards.spike=skip", "train.guards.spike_min_history=4", "train.precision=fp32"]
    for more in (["name=torch"], ["parallel.engine=deepspeed", f"parallel.zero_stage={stage}"]):
        run_with_faults(fresh, "nan:rank=1,step=5;spike:rank=0,step=9,factor=60", *settings, *more, ranks=2)
    ours, expected = ([record for record in lines(fresh, name) if record["step"] != 5] for name in ("mini", "torch"))
    assert [record["step"] for record in lines(fresh) if "skipped" in record] == [5, 9]
    assert difference(ours, {record["step"]: record for record in expected}) < 1e-4
    assert proven(fresh)


@pytest.mark.slow
def test_a_flipped_bit_in_a_copy_is_found_and_named(fresh):
    """Of three copies two agree. Nothing of it was saved: the same command goes on as if it had not been."""
    settings = ["parallel.dp_replicate=3", "train.batch_tokens=768",
                "train.guards.replica_hash_every=5", "train.checkpoint.every_steps=8"]
    run_train(fresh, "name=whole", *settings, ranks=3)
    result = run_with_faults(fresh, "flip:rank=1,step=6", *settings, ranks=3, expect=1)
    assert "bit 22 of element" in result.stdout
    assert all(text in result.stderr for text in ("since step 5", "rank 1 on ", "differs from rank 0 on "))
    # Which ranks print it before they are ended is chance; those other than 0 do with their number.
    assert re.search(r"train stops here(?: on rank \d)?: Training stopped in step 8", result.stderr)
    assert not list((train_folder(fresh) / "checkpoints").glob("step-*"))
    run_with_faults(fresh, "flip:rank=1,step=6", *settings, ranks=3)
    assert curve(fresh) == curve(fresh, "whole")


def patience(config, *settings, ranks, least_s):
    """The setting of a limit that no healthy step reaches here: twice what a whole run of a few steps takes."""
    began = time.monotonic()
    run_train(config, "name=pace", *settings, "train.steps=4", ranks=ranks)
    return f"train.guards.hang_minutes={max(least_s, 2 * (time.monotonic() - began)) / 60}"


@pytest.mark.slow
def test_of_three_ranks_the_one_that_hangs_is_named_and_training_is_started_again(fresh):
    """Under the launcher, which starts it again."""
    batch = "train.batch_tokens=768"
    ended = run_python("launch/submit.py", "--stage", "train", "--config", fresh, "--cluster", "local",
                       "launch.processes=3", batch, patience(fresh, batch, ranks=3, least_s=6), f"train.hooks={HOOKS}",
                       DROVER_FAULTS="hang:rank=1,step=6")
    assert "train hangs on rank 1" in ended.stderr, ended.stderr
    folder = hang_folder(train_folder(fresh), "local.0.0")
    assert [(record.step, bool(record.waits)) for record in read_hang(folder)] == [(5, True), (5, False), (5, True)]
    assert "faulty" in (folder / "rank1.stacks").read_text()
    assert all(b"all_reduce" in (folder / f"rank{rank}.flight.json").read_bytes() for rank in range(3))
    assert judge_hang(folder, 3).late == ((1, os.uname().nodename),)
    assert [(event["status"], event["next"]) for event in read_attempts(fresh.parent / "runs/mini")
            if event["event"] == "ended"] == [("hung", "restart"), ("done", "leave")]
    assert [record["step"] for record in curve(fresh)] == list(range(1, 13))
