"""Training as users run it: what it says, kill and continue, damaged checkpoints, changed settings."""

import json
import os
import re
import resource

import pytest

from pipeline.contract.manifest import read_manifest
from pipeline.records.checkpoints import complete_checkpoints
from tests.conftest import run_stage
from tests.stages.training import curve, lines, run_with_faults, train_folder


def checkpoints(config, name="mini"):
    return train_folder(config, name) / "checkpoints"


def test_a_run_trains_and_says_so(fresh):
    """Under torch's own agent; and what is logged, measured and saved on the way changes no loss."""
    run_stage("train", fresh, ranks=2, cold=True)
    metrics, folder = lines(fresh), train_folder(fresh)
    assert [record["step"] for record in metrics] == list(range(1, 13))
    assert metrics[-1]["loss"] < 0.85 * metrics[0]["loss"]
    assert [record["samples"] for record in metrics] == [[16 * step, 16 * step + 16] for step in range(12)]
    for key in ("tokens_per_s", "data_wait_s", "step_s", "memory_mb"):
        assert all(isinstance(record[key], (int, float)) for record in metrics)
    assert metrics[-1]["mfu"] is None  # this CPU's peak is not known: no figure rather than a guess
    assert [record["step"] for record in metrics if "heldout_bpb" in record] == [4, 8, 12]
    assert {record["step"] for record in lines(fresh, log="samples")} == {6, 12}
    assert [record["event"] for record in lines(fresh, log="events")] == ["start", *["checkpoint"] * 3, "finish"]
    assert len(list(checkpoints(fresh).iterdir())) == 2
    counts = read_manifest(folder).counts
    assert counts["tokens"] == 12 * 1024 and counts["restarts"] == 0
    assert run_stage("train", fresh, ranks=2).stdout.count("up to date") == 1
    run_stage("train", fresh, "name=quiet", "train.heldout_every=1000", "train.sample_every=1000",
              "train.checkpoint.every_steps=1000", "train.loader_threads=3", ranks=2)
    assert [record["loss"] for record in metrics] == [record["loss"] for record in curve(fresh, "quiet")]


@pytest.mark.parametrize("damage", ["flip", pytest.param("cut", marks=pytest.mark.slow), "remove", "marker",
                                    pytest.param("torn marker", marks=pytest.mark.slow)])
def test_a_damaged_newest_checkpoint_is_named_and_passed_over(begun, damage):
    """What was once finished is set aside for the user to look at; only what never was is removed."""
    newest = checkpoints(begun) / "step-00000008"
    victim = newest / ("COMPLETE.json" if "marker" in damage else "rank-00000.safetensors")
    if damage == "flip":
        content = bytearray(victim.read_bytes())
        content[len(content) // 2] ^= 1
        victim.write_bytes(content)
    elif damage in ("cut", "torn marker"):
        os.truncate(victim, 20)
    else:
        victim.unlink()
    result = run_stage("train", begun)
    assert f"checkpoint {newest.name}" in result.stdout and "continuing after step 4 " in result.stdout
    assert newest.with_name(f"{newest.name}.damaged").is_dir() == (damage != "marker")
    assert curve(begun) == curve(begun, "whole")


def test_changed_settings_of_a_begun_run_are_refused_then_accepted_with_a_trace_that_outlives_kills(begun):
    """It must not depend on the attempt that happens to finish; and the arithmetic stays what the run was begun in."""
    changed = ["train.lr=0.02", "seed=5", "train.precision=auto"]  # another order: the plan in the checkpoint differs
    assert "train.lr: 0.01 -> 0.02" in run_stage("train", begun, *changed, expect=2).stderr
    run_with_faults(begun, "kill:rank=0,step=13", *changed, "--accept-drift", "train.checkpoint.background=false",
                    expect=-9)
    assert "fp64, as the run was begun" in run_stage("train", begun, *changed, ranks=2).stdout
    assert curve(begun)[-1]["lr"] == pytest.approx(0.002)  # the new rate's floor
    assert [entry["differences"] for entry in read_manifest(train_folder(begun)).drift] == [
        ["seed: 0 -> 5", "train.lr: 0.01 -> 0.02", 'train.precision: "fp64" -> "auto"']]


def test_what_a_begun_run_cannot_become_is_refused(begun):
    for settings, told in (
            (["model.layers=3", "--accept-drift"],
             ["model.layers: 2 -> 3", "cannot go on as another"]),
            (["train.steps=6", "--accept-drift"], ["at step 8 already, beyond train.steps 6"]),
            (["train.optimizer=muon"], ['train.optimizer: absent -> "muon"']),
            (["train.optimizer=muon", "--accept-drift"], ["does not hold momentum.layers.0.attention.wq.weight, nor "]),
            (["train.packing=best_fit"], ["train.packing"]),
            (["model.rope_theta=1e6"], ["model.rope_theta: 500000.0 -> 1000000.0", "--accept-drift"])):
        said = run_stage("train", begun, *settings, expect=2).stderr
        assert all(text in said for text in told) and "Traceback" not in said, said
    run_stage("train", begun, "--accept-drift")  # the other one was asked for meanwhile
    assert curve(begun) == curve(begun, "whole")


def test_a_begun_run_extends_its_context_by_name_with_its_moments(begun):
    longer = ["model.context_length=256", "model.rope_theta=1e6", "train.sequence_length=128", "--accept-drift"]
    assert "continuing after step 8 " in run_stage("train", begun, *longer).stdout
    assert set(read_manifest(train_folder(begun)).drift[0]["differences"]) == {
        "model.context_length: 128 -> 256", "model.rope_theta: 500000.0 -> 1000000.0",
        "train.sequence_length: 64 -> 128"}
    longer_loss, short_loss = (curve(begun, name)[8]["loss"] for name in ("mini", "whole"))
    assert longer_loss != pytest.approx(short_loss, rel=1e-6) and longer_loss == pytest.approx(short_loss, rel=0.2)


def test_a_finished_run_can_be_mended_prolonged_and_forced(begun):
    victim, loss = checkpoints(begun, "whole") / "step-00000016/rank-00000.safetensors", curve(begun, "whole")

    def said(*settings):
        return run_stage("train", begun, "name=whole", *settings).stdout
    victim.unlink()
    told = said()
    assert "making it again" in told and "is damaged" in told and victim.is_file() and curve(begun, "whole") == loss
    assert "continuing after step 16" in said("train.steps=20", "--accept-drift")
    assert [record["step"] for record in curve(begun, "whole")] == list(range(1, 21))
    manifest = read_manifest(train_folder(begun, "whole"))
    assert manifest.counts["steps"] == 20 and "train.steps: 16 -> 20" in manifest.drift[0]["differences"]
    assert "up to date" in said("train.steps=20")
    said("train.steps=2", "train.warmup_steps=1", "--force")
    assert (begun.parent / "runs/whole/train.replaced-1/checkpoints/step-00000020/COMPLETE.json").is_file()


def test_a_damaged_newer_checkpoint_is_not_kept_in_place_of_a_sound_one(begun):
    """With keep=1 the sound checkpoint must outlive the damaged one that has a higher step number."""
    before, newest = complete_checkpoints(train_folder(begun))
    os.truncate(next(newest.glob("*.safetensors")), 10)
    settings = ["train.checkpoint.keep=1", "train.checkpoint.background=false"]
    for left in ([before], [before, newest]):  # the one that a start goes on from stays until its end
        run_with_faults(begun, "kill:rank=0,step=7;kill:rank=0,step=10", *settings, expect=-9)
        assert complete_checkpoints(train_folder(begun)) == left
    assert newest.with_name(f"{newest.name}.damaged").is_dir()
    run_stage("train", begun, *settings)
    assert [path.name for path in complete_checkpoints(train_folder(begun))] == ["step-00000016"]
    assert curve(begun) == curve(begun, "whole")


def test_a_kill_between_checkpoint_and_log_loses_no_line(begun):
    """The checkpoint holds its step's metrics; a log that lacks them gets them, held-out loss and samples included.
    A line that the kill has torn is cut off."""
    path = train_folder(begun) / "metrics.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines(begun) if line["step"] < 8) + '{"step": 6, "lo')
    assert "cut 15 bytes" in run_stage("train", begun).stdout
    assert curve(begun) == curve(begun, "whole")


def test_a_loss_that_is_no_number_stops_the_run_with_its_samples(fresh):
    result = run_stage("train", fresh, "train.lr=1e30", "train.warmup_steps=0", "train.clip_norm=1e30", expect=2)
    assert re.search(r"stopped at step 10: 9 updates in a row.*loss (nan|inf)", result.stderr)
    assert "samples [" in result.stderr and "no sample texts after step 6" in result.stdout
    assert "NaN" not in (train_folder(fresh) / "metrics.jsonl").read_text()  # no word of JSON's
    assert "Traceback" not in result.stderr


def test_a_full_disk_stops_with_a_paragraph_and_keeps_earlier_checkpoints(begun):
    """The file size limit of the process stands in for the disk: writing beyond it fails like a full one. And where
    every checkpoint is damaged, training does not start again in silence."""
    result = run_stage("train", begun, expect=2, limits={resource.RLIMIT_FSIZE: 100_000})
    assert "full" in result.stderr, result.stdout + result.stderr
    assert [path.name for path in complete_checkpoints(train_folder(begun))] == ["step-00000004", "step-00000008"]
    for file in checkpoints(begun).glob("step-*/*.safetensors"):
        os.truncate(file, 10)
    for _ in range(2):
        assert "Every finished checkpoint" in run_stage("train", begun, expect=2).stderr
    run_stage("train", begun, "--force")
    assert curve(begun) == curve(begun, "whole")


def test_torn_token_shards_and_ranks_that_do_not_fit_the_batch_are_refused(fresh, encoded):
    result = run_stage("train", fresh, ranks=3, expect=2)
    assert "16 sequences" in result.stderr and "not divisible by 3 data-parallel ranks" in result.stderr
    assert result.stderr.count("stops here") == 1
    shard = next((encoded.parent / "runs/mini/encode/train").glob("*.arrow"))
    content = shard.read_bytes()
    try:
        os.truncate(shard, len(content) // 2)
        result = run_stage("train", fresh, expect=2)
        assert shard.name in result.stderr and "Traceback" not in result.stderr
    finally:
        shard.write_bytes(content)
