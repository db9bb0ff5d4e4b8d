"""Training as users run it: kill and continue, damaged checkpoints, other world sizes, requests to stop."""

from __future__ import annotations

import json
import os
import random
import re
import resource
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from pipeline.contract.manifest import read_manifest
from pipeline.files import read_lines
from pipeline.records.checkpoints import complete_checkpoints, step_of
from pipeline.records.metrics import read_metrics
from tests.conftest import REPOSITORY, environment, run_stage, stage_command
from tests.stages.training import curve, descendants, train_and_kill, train_folder
from tests.waiting import wait_for


def test_workers_end_when_their_agent_is_killed(fresh):
    """Otherwise they would go on writing into the run that the user starts next."""
    command = stage_command("train", fresh, "train.steps=100000", ranks=2)
    process = subprocess.Popen(command, cwd=REPOSITORY, env=environment(), stdout=subprocess.DEVNULL,
                               stderr=subprocess.DEVNULL)
    wait_for(lambda: list(read_lines(train_folder(fresh) / "metrics.jsonl")))
    workers = descendants(process.pid)
    assert len(workers) >= 2
    process.kill()
    process.wait()
    wait_for(lambda: not any(Path(f"/proc/{worker}").exists() for worker in workers))


def test_a_run_trains_and_says_so(fresh):
    run_stage("train", fresh, ranks=2, cold=True)
    metrics, folder = read_metrics(train_folder(fresh) / "metrics.jsonl"), train_folder(fresh)
    assert [record["step"] for record in metrics] == list(range(1, 13))
    assert metrics[-1]["loss"] < 0.85 * metrics[0]["loss"]
    assert [record["samples"] for record in metrics] == [[16 * step, 16 * step + 16] for step in range(12)]
    for key in ("lr", "grad_norm", "tokens", "tokens_per_s", "data_wait_s", "step_s", "memory_mb"):
        assert all(isinstance(record[key], (int, float)) for record in metrics)
    assert metrics[-1]["mfu"] is None  # this CPU's peak is not known: no figure rather than a guess
    assert [record["step"] for record in metrics if "heldout_bpb" in record] == [4, 8, 12]
    assert {record["step"] for record in read_lines(folder / "samples.jsonl")} == {6, 12}
    assert [record["event"] for record in read_lines(folder / "events.jsonl")] == \
        ["start", "checkpoint", "checkpoint", "checkpoint", "finish"]
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == ["step-00000008", "step-00000012"]
    assert list((folder.parent / "tensorboard").glob("events.out.tfevents.*"))
    manifest = read_manifest(folder)
    assert manifest.counts["tokens"] == 12 * 1024 and manifest.counts["restarts"] == 0
    assert "up to date" in run_stage("train", fresh).stdout


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.soak)])
def test_kill_9_and_continue_gives_the_same_curve_to_the_last_bit(fresh, seed):
    """Two ranks, several kills at random steps, over an epoch boundary."""
    overrides = ["train.steps=70", "train.heldout_every=20", "train.warmup_steps=5"]
    run_stage("train", fresh, "name=whole", *overrides, ranks=2)
    whole = curve(fresh, "whole")
    epoch = read_manifest(train_folder(fresh, "whole")).counts["epochs"]["all"]
    assert epoch > 1, "the test must cross an epoch boundary"
    chance = random.Random(seed)
    for after in sorted(chance.sample(range(2, 65), 3)):
        train_and_kill(fresh, *overrides, ranks=2, after_step=after)
    run_stage("train", fresh, *overrides, ranks=2)
    assert curve(fresh) == whole
    lines = list(read_lines(train_folder(fresh) / "metrics.jsonl"))
    assert len(lines) > 70, "steps after the last checkpoint were done again"
    by_step = {record["step"]: record["loss"] for record in lines}
    assert all(record["loss"] == by_step[record["step"]] for record in lines)
    assert read_manifest(train_folder(fresh)).counts["restarts"] == 3


def test_a_request_to_stop_saves_and_the_same_command_continues(fresh):
    overrides = ["train.steps=200", "train.checkpoint.every_steps=1000", "train.sample_every=1000",
                 "train.heldout_every=1000"]
    train_and_kill(fresh, *overrides, ranks=1, after_step=3, how=signal.SIGTERM)
    events = list(read_lines(train_folder(fresh) / "events.jsonl"))
    assert [event["event"] for event in events] == ["start", "checkpoint", "stop"]
    stopped = events[-1]["step"]
    assert events[-1]["reason"] == "SIGTERM" and 3 <= stopped < 200
    result = run_stage("train", fresh, *overrides)
    assert f"continuing after step {stopped} " in result.stdout
    assert [record["step"] for record in read_lines(train_folder(fresh) / "metrics.jsonl")] == list(range(1, 201))


def test_logging_and_checkpointing_change_no_loss(fresh):
    quiet = ["train.heldout_every=1000", "train.sample_every=1000", "train.checkpoint.every_steps=1000",
             "train.loader_threads=3"]
    run_stage("train", fresh)
    run_stage("train", fresh, "name=quiet", *quiet)
    assert [record["loss"] for record in curve(fresh)] == [record["loss"] for record in curve(fresh, "quiet")]


def test_one_rank_and_two_train_alike_in_float64(fresh):
    run_stage("train", fresh, "train.precision=fp64", "train.micro_batch=16")
    run_stage("train", fresh, "train.precision=fp64", "name=two", ranks=2)
    for one, two in zip(curve(fresh), curve(fresh, "two"), strict=True):
        assert one["samples"] == two["samples"] and one["targets"] == two["targets"]
        assert one["loss"] == pytest.approx(two["loss"], rel=1e-12)
        assert one["grad_norm"] == pytest.approx(two["grad_norm"], rel=1e-12)


def test_a_run_continues_on_another_number_of_ranks(fresh):
    settings = ["train.precision=fp64", "train.steps=24"]
    run_stage("train", fresh, "name=whole", *settings)
    train_and_kill(fresh, *settings, ranks=2, after_step=9)
    run_stage("train", fresh, *settings)
    for one, two in zip(curve(fresh, "whole"), curve(fresh), strict=True):
        assert one["samples"] == two["samples"] and one["loss"] == pytest.approx(two["loss"], rel=1e-11)


@pytest.mark.parametrize("damage", ["flip", "cut", "remove", "marker", "torn marker"])
def test_a_damaged_newest_checkpoint_is_named_and_passed_over(fresh, damage):
    run_stage("train", fresh, "name=whole", "train.steps=16")
    train_and_kill(fresh, "train.steps=16", ranks=1, after_step=8, log="events")
    newest = complete_checkpoints(train_folder(fresh))[-1]  # a kill may leave one without a marker
    victim = next(newest.glob("*.safetensors"))
    if damage == "flip":
        content = bytearray(victim.read_bytes())
        content[len(content) // 2] ^= 1
        victim.write_bytes(content)
    elif damage == "cut":
        os.truncate(victim, victim.stat().st_size // 2)
    elif damage == "remove":
        victim.unlink()
    elif damage == "torn marker":
        os.truncate(newest / "COMPLETE.json", 20)
    else:
        (newest / "COMPLETE.json").unlink()
    result = run_stage("train", fresh, "train.steps=16")
    assert f"checkpoint {newest.name}" in result.stdout
    # What was once finished is set aside for the user to look at; only what never was is removed.
    assert newest.with_name(f"{newest.name}.damaged").is_dir() == (damage != "marker")
    resumed = int(re.search(r"continuing after step (\d+)", result.stdout)[1])
    assert resumed < int(newest.name.removeprefix("step-"))
    assert curve(fresh) == curve(fresh, "whole")


def test_a_torn_line_of_the_log_is_cut(fresh):
    train_and_kill(fresh, ranks=1, after_step=4, log="events")
    with open(train_folder(fresh) / "metrics.jsonl", "a") as file:
        file.write('{"step": 6, "lo')
    assert "cut 15 bytes" in run_stage("train", fresh).stdout
    assert [record["step"] for record in curve(fresh)] == list(range(1, 13))


def test_changed_settings_of_a_begun_run_are_refused_then_accepted_with_a_trace(fresh):
    train_and_kill(fresh, ranks=1, after_step=4, log="events")
    assert "train.lr: 0.01 -> 0.02" in run_stage("train", fresh, "train.lr=0.02", expect=2).stderr
    run_stage("train", fresh, "train.lr=0.02", "--accept-drift")
    assert curve(fresh)[-1]["lr"] == pytest.approx(0.002)  # the new rate's floor
    assert read_manifest(train_folder(fresh)).drift[0]["differences"] == ["train.lr: 0.01 -> 0.02"]


def test_accepted_drift_survives_further_kills(fresh):
    """Its trace must not depend on the attempt that happens to finish."""
    train_and_kill(fresh, "train.steps=30", ranks=1, after_step=4, log="events")
    changed = ["train.steps=30", "seed=5"]  # another order of samples: the plan in the checkpoint differs
    train_and_kill(fresh, *changed, "--accept-drift", ranks=2, after_step=7)
    run_stage("train", fresh, *changed, ranks=2)
    assert read_manifest(train_folder(fresh)).drift == [{"stage": "train", "differences": ["seed: 0 -> 5"]}]


def test_another_network_cannot_go_on_from_a_checkpoint(fresh):
    train_and_kill(fresh, ranks=1, after_step=4, log="events")
    result = run_stage("train", fresh, "model.layers=3", "--accept-drift", expect=2)
    assert "model.layers: 2 -> 3" in result.stderr and "cannot go on as another" in result.stderr


def test_a_begun_run_extends_its_context_by_name_with_its_moments(fresh):
    settings = ["train.precision=fp64", "train.steps=16"]
    longer = ["model.context_length=256", "model.rope_theta=1e6", "train.sequence_length=128"]
    train_and_kill(fresh, *settings, ranks=1, after_step=8, log="events")
    said = run_stage("train", fresh, *settings, *longer, expect=2).stderr
    assert "model.rope_theta: 500000.0 -> 1000000.0" in said and "--accept-drift" in said
    shutil.copytree(train_folder(fresh).parent, train_folder(fresh, "spread").parent)
    done = step_of(complete_checkpoints(train_folder(fresh))[-1])
    told = run_stage("train", fresh, *settings, *longer, "--accept-drift").stdout
    assert f"continuing after step {done} " in told
    assert set(read_manifest(train_folder(fresh)).drift[0]["differences"]) == {
        "model.context_length: 128 -> 256", "model.rope_theta: 500000.0 -> 1000000.0",
        "train.sequence_length: 64 -> 128"}
    run_stage("train", fresh, "name=spread", *settings, *longer, "--accept-drift", "parallel.tp=2", ranks=2)
    run_stage("train", fresh, "name=short", *settings)
    one, spread, short = (curve(fresh, name)[done:] for name in ("mini", "spread", "short"))
    assert [record["loss"] for record in spread] == pytest.approx([record["loss"] for record in one], rel=1e-12)
    assert one[0]["loss"] != pytest.approx(short[0]["loss"], rel=1e-6)
    marker = json.loads((train_folder(fresh) / "checkpoints/step-00000016/COMPLETE.json").read_text())
    assert marker["config"]["model"]["context_length"] == 256


def test_a_finished_run_can_be_prolonged(fresh):
    settings = ["train.schedule=wsd", "train.decay_steps=2"]
    run_stage("train", fresh, *settings)
    result = run_stage("train", fresh, *settings, "train.steps=20", "--accept-drift")
    assert "continuing after step 12" in result.stdout
    assert [record["step"] for record in curve(fresh)] == list(range(1, 21))
    manifest = read_manifest(train_folder(fresh))
    assert manifest.counts["steps"] == 20 and "train.steps: 12 -> 20" in manifest.drift[0]["differences"]
    assert "up to date" in run_stage("train", fresh, *settings, "train.steps=20").stdout


def test_when_every_checkpoint_is_damaged_training_does_not_silently_start_again(fresh):
    train_and_kill(fresh, "train.steps=40", ranks=1, after_step=8, log="events")
    for file in (train_folder(fresh) / "checkpoints").glob("step-*/*.safetensors"):
        os.truncate(file, 10)
    for _ in range(2):
        result = run_stage("train", fresh, "train.steps=40", expect=2)
        assert "Every finished checkpoint" in result.stderr
    run_stage("train", fresh, "--force")


def test_a_damaged_newer_checkpoint_is_not_kept_in_place_of_a_sound_one(fresh):
    """With keep=1 the sound checkpoint must outlive the damaged one that has a higher step number."""
    settings = ["train.steps=40", "train.checkpoint.every_steps=4", "train.checkpoint.keep=2"]
    train_and_kill(fresh, *settings, ranks=1, after_step=12, log="events")
    before, newest = complete_checkpoints(train_folder(fresh))[-2:]
    os.truncate(next(newest.glob("*.safetensors")), 10)
    train_and_kill(fresh, *settings, "train.checkpoint.keep=1", ranks=1, after_step=int(newest.name[5:]) + 1)
    sound = [path.name for path in (train_folder(fresh) / "checkpoints").glob("step-????????")
             if (path / "COMPLETE.json").is_file()]
    assert sound and max(sound) >= before.name and newest.with_name(f"{newest.name}.damaged").is_dir()
    run_stage("train", fresh, *settings)


def test_a_kill_between_checkpoint_and_log_loses_no_line(fresh):
    """The checkpoint holds its step's metrics; a log that lacks them gets them, held-out loss and samples included."""
    run_stage("train", fresh, "name=whole", "train.steps=24")
    train_and_kill(fresh, "train.steps=24", ranks=1, after_step=8, log="events")
    path = train_folder(fresh) / "metrics.jsonl"
    newest = step_of(complete_checkpoints(train_folder(fresh))[-1])
    lines = [line for line in path.read_text().splitlines() if json.loads(line)["step"] < newest]
    path.write_text("".join(line + "\n" for line in lines))
    run_stage("train", fresh, "train.steps=24")
    assert curve(fresh) == curve(fresh, "whole")


def test_arithmetic_stays_what_the_run_was_begun_in(fresh):
    """`auto` on a machine with other hardware must not change it."""
    train_and_kill(fresh, "train.precision=fp64", ranks=1, after_step=4, log="events")
    marker = sorted((train_folder(fresh) / "checkpoints").glob("step-*/COMPLETE.json"))[-1]
    assert json.loads(marker.read_text())["progress"]["precision"] == "fp64"
    result = run_stage("train", fresh, "train.precision=auto", "--accept-drift")
    assert "fp64, as the run was begun" in result.stdout


def test_steps_beyond_which_a_run_already_is_are_refused(fresh):
    train_and_kill(fresh, "train.steps=40", ranks=1, after_step=12, log="events")
    result = run_stage("train", fresh, "train.steps=6", "--accept-drift", expect=2)
    assert re.search(r"at step \d+ already, beyond train.steps 6", result.stderr)


def test_what_only_one_rank_knows_is_heard(fresh, encoded):
    """An error that befalls rank 1 alone: its sentence reaches the terminal."""
    code = ("import os, sys\nfrom pipeline.contract.entry import stage_main\nfrom pipeline.errors import UserError\n"
            "def body(work):\n    from pipeline.parallel.ranks import start_ranks\n    ranks = start_ranks()\n"
            "    if ranks.rank == 1:\n        raise UserError('the cable of rank 1 is loose')\n    ranks.barrier()\n"
            "sys.exit(stage_main('train', body))\n")
    script = fresh.parent / "script.py"
    script.write_text(code)
    command = stage_command("train", fresh, ranks=2)
    command[command.index("pipeline.train") - 1:command.index("pipeline.train") + 1] = [str(script)]
    result = subprocess.run(command, cwd=REPOSITORY, env=environment(), capture_output=True, text=True, check=False)
    assert result.returncode != 0 and "train stops here on rank 1: the cable of rank 1 is loose" in result.stderr


def test_force_sets_the_old_checkpoints_aside(fresh):
    run_stage("train", fresh)
    run_stage("train", fresh, "train.lr=0.02", "--force")
    assert (fresh.parent / "runs/mini/train.replaced-1/checkpoints/step-00000012/COMPLETE.json").is_file()


def test_a_loss_that_is_no_number_stops_the_run_with_its_samples(fresh):
    result = run_stage("train", fresh, "train.lr=1e30", "train.warmup_steps=0", "train.clip_norm=1e30", expect=2)
    assert re.search(r"stopped at step 10: 9 updates in a row.*loss (nan|inf)", result.stderr)
    assert "samples [" in result.stderr and "no sample texts after step 6" in result.stdout
    assert "NaN" not in (train_folder(fresh) / "metrics.jsonl").read_text()  # no word of JSON's
    assert "Traceback" not in result.stderr


def test_a_full_disk_stops_with_a_paragraph_and_keeps_earlier_checkpoints(fresh):
    """The file size limit of the process stands in for the disk: writing beyond it fails like a full one."""
    run_stage("train", fresh, "name=whole")
    result = run_stage("train", fresh, "train.checkpoint.every_steps=4", expect=2,
                       limits={resource.RLIMIT_FSIZE: 100_000})
    assert "full" in result.stderr, result.stdout + result.stderr
    assert not list((train_folder(fresh) / "checkpoints").glob("*"))
    run_stage("train", fresh)
    assert curve(fresh) == curve(fresh, "whole")


def test_ranks_that_do_not_fit_the_batch_are_refused_with_the_numbers(fresh):
    result = run_stage("train", fresh, "train.micro_batch=16", ranks=2, expect=2)
    assert "16 sequences" in result.stderr and "not divisible by 32" in result.stderr
    assert result.stderr.count("stops here") == 1


def test_torn_token_shards_are_named(fresh, encoded):
    shard = next((encoded.parent / "runs/mini/encode/train").glob("*.arrow"))
    content = shard.read_bytes()
    try:
        os.truncate(shard, len(content) // 2)
        result = run_stage("train", fresh, expect=2)
        assert shard.name in result.stderr and "Traceback" not in result.stderr
    finally:
        shard.write_bytes(content)


def test_the_json_lines_are_one_object_a_line(fresh):
    run_stage("train", fresh)
    for name in ("metrics", "samples", "events"):
        for line in (train_folder(fresh) / f"{name}.jsonl").read_text().splitlines():
            assert isinstance(json.loads(line), dict)
