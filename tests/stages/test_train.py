"""Training as users run it: what it says, kill and continue, damaged checkpoints, changed settings."""

import json
import os
import re
import signal

import pytest
import yaml

from drover.pipeline.contract.state import PROGRESS, read_state, write_state
from drover.pipeline.core.files import read_json
from drover.pipeline.data.sampling.consumption import as_if
from drover.pipeline.records.checkpoints import complete_checkpoints, read_marker
from drover.pipeline.records.goodput import goodput
from drover.pipeline.records.metrics import RunFacts
from drover.pipeline.training.loop import MOST_BRIEF
from drover.tools.audit import audit
from tests.conftest import run_stage, write_config
from tests.pages import files
from tests.stages.test_shard import documents
from tests.stages.training import (
    assert_equal_but_for_rounding,
    copy_run,
    curve,
    events,
    lines,
    manifest_of,
    proven,
    rank_process,
    reusing,
    run_train,
    run_with_faults,
    started,
    stored_tensors,
    train_folder,
    weights,
)
from tests.waiting import HANG_S, wait_for


def checkpoints(config, name="mini"):
    return train_folder(config, name) / "checkpoints"


def test_a_run_trains_and_says_so(fresh):
    """And what is logged, measured and saved on the way changes no loss."""
    output = run_train(fresh, ranks=2).stdout
    measured = [(line["step"], *line["validation_sample_bpb"].values()) for line in lines(fresh)
                if "validation_sample_bpb" in line]
    for step, bits in measured:
        assert re.search(f"after step {step} validation: loss [0-9.]+, {bits:.4f} bits per byte\n", output)
    assert len(measured) > 1
    metrics, folder = lines(fresh), train_folder(fresh)
    assert [record["step"] for record in metrics] == list(range(1, 13))
    assert metrics[-1]["loss"] < 0.85 * metrics[0]["loss"]
    assert [record["samples"] for record in metrics] == [[16 * step, 16 * step + 16] for step in range(12)]
    for key in ("tokens_per_s", "data_wait_s", "step_s", "memory_mb"):
        assert all(isinstance(record[key], (int, float)) for record in metrics)
    assert metrics[-1]["mfu"] is None  # this CPU's peak is not known: no figure rather than a guess
    assert [record["step"] for record in metrics if "validation_sample_bpb" in record] == [4, 8, 12]
    assert {record["step"] for record in lines(fresh, log="samples")} == {6, 12}
    start, *others = lines(fresh, log="events")
    assert [record["event"] for record in (start, *others)] == ["start", *["checkpoint"] * 3, "finish"]
    assert start["startup"].keys() == {"imports", "rendezvous", "data", "checkpoint", "model", "other"}
    assert 0 < start["startup"]["rendezvous"] <= sum(start["startup"].values())
    # The report's time ends with the record of the end: after the last step, before training tells its progress last.
    # That is computed before its file is written, whose time may be a tick of the kernel behind.
    result = goodput(RunFacts(folder.parent))
    recorded = read_json(folder / PROGRESS)["goodput"]
    written = (folder / PROGRESS).stat().st_mtime + 0.02
    assert result.effective_s / (written - result.started) - 0.0001 <= recorded <= result.share + 0.001
    assert result.share <= metrics[-1]["goodput"] + 0.001
    counts = manifest_of(fresh).counts
    assert counts["tokens"] == 12 * 1024 and counts["restarts"] == 0
    run_train(fresh, "name=quiet", "train.validation_every=null", "train.sample_every=null",
              "train.checkpoint.every_steps=null", "train.loader_threads=3", ranks=2)
    quiet = curve(fresh, "quiet")
    assert [record["loss"] for record in metrics] == [record["loss"] for record in quiet]
    assert not any("validation_sample_bpb" in record for record in quiet) and not lines(fresh, "quiet", log="samples")
    assert [path.name for path in checkpoints(fresh, "quiet").iterdir()] == ["step-00000012"]


def test_one_seed_draws_the_weights_and_another_the_order(fresh):
    """At a rate that changes no weight, the last checkpoint has the initial ones."""
    drawn, orders, curves = {}, {}, {}
    for name, seeds in {"both": ["seed=1"], "alike": ["seed=1", "train.data_seed=1"],
                        "order": ["seed=1", "train.data_seed=2"], "weights": ["seed=2", "train.data_seed=1"]}.items():
        run_train(fresh, f"name={name}", *seeds, "train.steps=2", "train.warmup_steps=0", "train.lr=1e-30")
        newest = complete_checkpoints(checkpoints(fresh, name).parent)[0]
        drawn[name] = stored_tensors(fresh, name)["model.tok_embeddings.weight"].tolist()
        orders[name], curves[name] = read_marker(newest).progress.plan_sha256, curve(fresh, name)
    assert curves["both"] == curves["alike"] and weights(fresh, "both") == weights(fresh, "alike")
    assert drawn["both"] == drawn["order"] != drawn["weights"]
    assert orders["both"] == orders["alike"] == orders["weights"] != orders["order"]
    assert len({line[0]["loss"] for line in curves.values()}) == 3


def test_a_damaged_newest_checkpoint_is_named_and_passed_over(interrupted):
    """It is set aside for the user to look at. One without its marker: tests/training/test_checkpoints.py."""
    newest = checkpoints(interrupted) / "step-00000008"
    victim = newest / "rank-00000.safetensors"
    victim.write_bytes(victim.read_bytes()[:-1] + b"!")
    result = run_train(interrupted)
    assert f"checkpoint {newest.name}" in result.stdout and "continuing after step 4 " in result.stdout
    assert newest.with_name(f"{newest.name}.damaged").is_dir()
    assert curve(interrupted) == curve(interrupted, "whole")


def test_changed_settings_of_a_begun_run_are_refused_then_accepted_with_a_trace_that_outlives_kills(interrupted):
    """It must not depend on the attempt that happens to finish; and the arithmetic stays what the run was begun in."""
    changed = ["train.lr=0.02", "seed=5", "train.precision=auto"]  # another order: the plan in the checkpoint differs
    assert "train.lr: 0.01 -> 0.02" in run_train(interrupted, *changed, expect=2).stderr
    run_with_faults(interrupted, "kill:rank=0,step=12", *changed, "--accept-changes",
                    "train.checkpoint.background=false", expect=-9)
    output = run_train(interrupted, *changed, ranks=2).stdout
    assert "fp64, as the run started" in output and f"warning: {as_if([8])[0]}" in output
    assert curve(interrupted)[-1]["lr"] == pytest.approx(0.002)  # the new rate's floor
    [resumed] = events(interrupted, "resume")[:1]
    assert resumed["step"] == 8 and "train.lr: 0.01 -> 0.02" in str(resumed["accepted"])
    [change] = events(interrupted, "plan_changed")
    assert change["step"] == 8 and "train.lr: 0.01 -> 0.02" in change["changes"]
    result = audit(train_folder(interrupted).parent)
    assert result.replanned == 2 and result.faults == [
        "after step 8 samples come in another order than before: a sequence may come again, or never"]
    manifest = manifest_of(interrupted)
    starts = goodput(RunFacts(train_folder(interrupted).parent)).starts
    assert manifest.counts["restarts"] == 2 == len(starts) - 1, "the killed one saved nothing"
    assert manifest.run_s == pytest.approx(sum(start.end - start.began for start in starts), abs=5)
    assert manifest.accepted == [
        "seed: 0 -> 5", "train.lr: 0.01 -> 0.02", 'train.precision: "fp64" -> "auto"']


def test_what_a_begun_run_cannot_become_is_refused(interrupted):
    for settings, messages in (
            (["model.layers=3", "--accept-changes"],
             ["model.layers: 2 -> 3", "A checkpoint cannot continue with another optimizer or as another network."]),
            (["train.steps=6", "--accept-changes"], ["at step 8 already, beyond train.steps 6"]),
            (["train.optimizer=muon", "--accept-changes"],
             ['train.optimizer: not set -> "muon"', "A checkpoint cannot continue with another optimizer"]),
            (["model.rope_theta=1e6"], ["model.rope_theta: 500000.0 -> 1000000.0", "--accept-changes"])):
        output = run_train(interrupted, *settings, expect=2).stderr
        assert all(text in output for text in messages) and "Traceback" not in output, output
    run_train(interrupted, "--accept-changes")  # the other one was asked for meanwhile
    assert curve(interrupted) == curve(interrupted, "whole")


def test_a_run_that_has_saved_nothing_takes_other_settings(fresh):
    """There is nothing to accept, and no trace of what was not used."""
    run_with_faults(fresh, "kill:rank=0,step=3", expect=-9)
    shorter = ["train.steps=2", "train.warmup_steps=1"]
    output = run_train(fresh, *shorter).stdout
    assert "train.steps: 12 -> 2" in output and "nothing is saved yet" in output and "train.replaced" in output
    assert not manifest_of(fresh).accepted and len(lines(fresh)) == 2
    run_train(fresh, *shorter, "name=other")
    assert curve(fresh) == curve(fresh, "other")


def test_a_begun_run_extends_its_context_by_name_with_its_moments(interrupted):
    longer = ["model.context_length=256", "model.rope_theta=1e6", "train.sequence_length=128", "--accept-changes"]
    assert "continuing after step 8 (8,192 tokens, 128 samples) from " in run_train(interrupted, *longer).stdout
    assert set(manifest_of(interrupted).accepted) == {
        "model.context_length: 128 -> 256", "model.rope_theta: 500000.0 -> 1000000.0",
        "train.sequence_length: 64 -> 128"}
    longer_loss, short_loss = (curve(interrupted, name)[8]["loss"] for name in ("mini", "whole"))
    assert longer_loss != pytest.approx(short_loss, rel=1e-6) and longer_loss == pytest.approx(short_loss, rel=0.2)


def test_a_finished_run_can_be_mended_prolonged_and_forced(interrupted):
    victim = checkpoints(interrupted, "whole") / "step-00000016/rank-00000.safetensors"
    loss = curve(interrupted, "whole")

    def retrain(*settings):
        return run_train(interrupted, "name=whole", *settings).stdout
    victim.unlink()
    output = retrain()
    assert "making it again" in output and "is damaged" in output and curve(interrupted, "whole") == loss
    assert "continuing after step 16" in retrain("train.steps=20", "--accept-changes")
    assert [record["step"] for record in curve(interrupted, "whole")] == list(range(1, 21))
    manifest = manifest_of(interrupted, name="whole")
    assert manifest.counts["steps"] == 20 and "train.steps: 16 -> 20" in manifest.accepted
    assert "up to date" in retrain("train.steps=20")
    retrain("train.steps=2", "train.warmup_steps=1", "--force")
    assert (interrupted.parent / "runs/whole/train.replaced/checkpoints/step-00000020/COMPLETE.json").is_file()


@pytest.mark.slow
def test_a_damaged_newer_checkpoint_is_not_kept_in_place_of_a_sound_one(interrupted):
    """With keep=1 the sound checkpoint must outlive the damaged one that has a higher step number."""
    before, newest = complete_checkpoints(train_folder(interrupted))
    os.truncate(next(newest.glob("*.safetensors")), 10)
    settings = ["train.checkpoint.keep=1", "train.checkpoint.background=false"]
    for left in ([before], [newest]):
        run_with_faults(interrupted, "kill:rank=0,step=7;kill:rank=0,step=10", *settings, expect=-9)
        assert complete_checkpoints(train_folder(interrupted)) == left
    assert newest.with_name(f"{newest.name}.damaged").is_dir()
    run_train(interrupted, *settings)
    assert [path.name for path in complete_checkpoints(train_folder(interrupted))] == ["step-00000016"]
    assert curve(interrupted) == curve(interrupted, "whole")


def test_a_kill_between_checkpoint_and_log_loses_no_line(interrupted):
    """The checkpoint holds its step's metrics; a log that lacks them gets them, validation loss and samples included.
    A line that the kill has torn is cut off."""
    path = train_folder(interrupted) / "metrics.jsonl"
    kept = [json.dumps(line) + "\n" for line in lines(interrupted) if line["step"] < 8]
    path.write_text("".join(kept) + '{"step": 6, "lo')
    assert "cut 15 bytes" in run_train(interrupted).stdout
    assert curve(interrupted) == curve(interrupted, "whole")


def test_a_loss_that_is_no_number_stops_the_run_with_its_samples(fresh):
    result = run_train(fresh, "train.lr=1e30", "train.warmup_steps=0", "train.clip_norm=1e30", expect=2)
    assert re.search(r"stopped at step 10: 9 updates in a row.*loss (nan|inf)", result.stderr)
    assert "samples [" in result.stderr and "of the documents code/" in result.stderr
    assert "no sample texts after step 6" in result.stdout
    assert "NaN" not in (train_folder(fresh) / "metrics.jsonl").read_text()  # no word of JSON's
    assert "Traceback" not in result.stderr


def test_where_every_checkpoint_is_damaged_training_does_not_start_again_in_silence(interrupted):
    for file in checkpoints(interrupted).glob("step-*/*.safetensors"):
        os.truncate(file, 10)
    assert "Every finished checkpoint" in run_train(interrupted, expect=2).stderr
    run_train(interrupted, "--force")
    assert curve(interrupted) == curve(interrupted, "whole")


def test_torn_token_shards_and_ranks_that_do_not_fit_the_batch_are_refused(tmp_path, encoded):
    config = copy_run(encoded, tmp_path)
    result = run_train(config, ranks=3, expect=2)
    assert "16 sequences" in result.stderr and "not divisible by 3 data-parallel ranks" in result.stderr
    assert result.stderr.count("stops here") == 1
    shard = next((tmp_path / "runs/mini/encode/train").glob("*.arrow"))
    os.truncate(shard, 1000)
    result = run_train(config, expect=2)
    assert shard.name in result.stderr and "Traceback" not in result.stderr


@pytest.fixture(scope="module")
def first(tmp_path_factory, encoded):
    """The run whose weights are taken; it has done 8 steps."""
    path = reusing(encoded, tmp_path_factory.mktemp("first"))
    run_train(path, "name=first", "train.precision=fp64", "train.steps=8")
    return train_folder(path, "first").parent


@pytest.mark.slow
def test_after_a_kill_it_goes_on_from_its_own_weights_on_a_longer_context(fresh, first):
    settings = [f"train.init_from={first}", "train.precision=fp64", "model.context_length=256", "model.rope_theta=1e6",
                "train.sequence_length=128"]
    output = run_train(fresh, "name=whole", *settings).stdout
    assert "; context_length 128 -> 256; rope_theta 500000.0 -> 1000000.0" in output
    run_with_faults(fresh, "kill:rank=0,step=7", *settings, "train.checkpoint.background=false", expect=-9)
    run_train(fresh, *settings)
    assert_equal_but_for_rounding(fresh, 0.0)
    assert events(fresh, "resume") and proven(fresh)


@pytest.mark.slow
def test_text_is_added_to_a_trained_model_as_the_page_says(tmp_path, encoded, corpus, first):
    """The old validation text is validation text again."""
    page = yaml.safe_load(files("continue")["configs/notes2.yaml"])
    (tmp_path / "new").mkdir()
    for number in range(30):
        (tmp_path / f"new/{number}.txt").write_text(f"note {number}: " + "what was written later " * number)
    write_config(tmp_path, corpus).rename(tmp_path / "notes.yaml")
    old, new = page["shard"]["sources"]
    old.update(name="code", paths=[f"{corpus}/*.txt"])
    new["paths"] = [f"{tmp_path}/new/*.txt"]
    page["tokenizer"]["path"] = str(encoded.parent / page["tokenizer"]["path"].replace("notes", "mini"))
    page["train"].update(init_from=str(first), steps=4, warmup_steps=1)
    (config := tmp_path / "notes2.yaml").write_text(yaml.safe_dump(page))
    for stage in ("shard", "tokenizer", "encode", "train"):
        output = run_stage(stage, config).stdout
    assert f"starts from the weights in {first}" in output
    runs = (encoded, "mini"), (config, "notes2")
    theirs, ours = ((path.parent / "runs" / name / "tokenizer/hf/tokenizer.json").read_bytes() for path, name in runs)
    assert theirs == ours
    before, after = ({document.text for document in documents(path, "validation", name) if document.source != "new"}
                     for path, name in runs)
    assert before and before == after


LONG = ["train.steps=100000", "train.checkpoint.every_steps=100000", "train.validation_every=100000",
        "train.sample_every=100000"]


def stopped(config):
    """The step after which the only start was stopped; its checkpoint is the last thing that happened before."""
    *_, saved, stop = [event for kind in ("checkpoint", "stop") for event in events(config, kind)]
    assert saved["step"] == stop["step"] == lines(config)[-1]["step"]
    assert (train_folder(config) / f"checkpoints/step-{stop['step']:08d}/COMPLETE.json").is_file()
    return stop["step"]


def test_a_signal_to_one_rank_of_three_stops_all_and_going_on_makes_sense(fresh):
    settings = [*LONG, "train.batch_tokens=768"]
    with started(fresh, *settings, ranks=3) as process:
        wait_for(lambda: lines(fresh), of=process)
        os.kill(rank_process(process.pid, 2), signal.SIGUSR2)
        process.wait(HANG_S)
    step, state = stopped(fresh), read_state(train_folder(fresh))
    assert (state.status, state.step, state.reason, state.again) == (
        "preempted", step, "SIGUSR2 on 1 of 3 ranks", True)
    longer = [f"train.steps={step + 2}", *settings[1:], "--accept-changes"]
    assert f"continuing after step {step}" in run_train(fresh, *longer, ranks=3).stdout
    assert [record["step"] for record in curve(fresh)] == list(range(1, step + 3))


def test_time_that_is_up_stops_and_going_on_makes_sense(fresh):
    """In the last step a request changes nothing."""
    limit = "train.stop_after_minutes=0.001"
    output = run_train(fresh, *LONG, limit, expect=130).stdout
    state = read_state(train_folder(fresh))
    assert stopped(fresh) == 1 and f"stopped after step 1 ({limit}); saved" in output
    [many] = events(fresh, "many_epochs")
    assert f"warning: all sources: {many['planned_epochs']['all sources']:.1f} epochs. Beyond 4" in output
    assert (state.step, state.again, state.idle) == (1, True, 1)
    write_state(train_folder(fresh), "preempted", again=True, idle=MOST_BRIEF)
    refusal = run_train(fresh, *LONG, limit, expect=2).stderr
    assert f"After step 2, 5 starts in a row had time for one step at most ({limit})" in refusal
    assert read_state(train_folder(fresh)).status == "failed", "no launcher starts it again"
    run_train(fresh, *LONG, limit, "train.steps=3", "train.warmup_steps=1", "--accept-changes")
    assert (len(events(fresh, "finish")), len(events(fresh, "many_epochs"))) == (1, 2)
