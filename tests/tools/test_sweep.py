"""Sweeps: what a file amounts to, what is refused, and nine runs that are killed twice and end in a page."""

import json
import os
import signal
import subprocess
import sys

import pytest
import yaml

from drover.pipeline.config.tree import Config
from drover.pipeline.core.errors import UserError
from drover.tools.sweep import main, places, read_sweep
from tests.conftest import environment, write_config
from tests.launch.recorded_slurm import Programs
from tests.refusal import printed, refused
from tests.stages.training import curve, weights
from tests.waiting import HANG_S, wait_for

QUICK = {"launch": {"processes": 1}, "train": {"steps": 6, "sample_every": None},
         "evaluate": {"prompts": ["a"], "prompt_tokens": 2}}


def write_sweep(folder, **changes):
    """The file of a sweep next to a base, with three rates and three seeds."""
    path = folder / "rates.yaml"
    path.write_text(yaml.safe_dump({"base": "mini.yaml", "vary": {"train.lr": [0.003, 0.01, 0.03]}, "seeds": [0, 1, 2],
                                    "baseline": "lr-0.01", **changes}))
    return path


@pytest.fixture
def base(tmp_path, corpus):
    return write_config(tmp_path, corpus, **QUICK)


def runs_of(path):
    """What a sweep would run, with the settings that it gives."""
    sweep = read_sweep(path)
    return sweep, {run.config.name: run for run in sweep.runs()}


def test_a_grid_and_named_variants_make_ordinary_runs_with_the_same_seeds(base):
    sweep, runs = runs_of(write_sweep(
        base.parent, baseline="base", variants={"narrow": {"model.dim": 16, "train.prompts": ["a: b"]}},
        vary={"train.lr": [0.01, 0.02], "train.schedule": ["wsd"]}, budget={"tokens": "8k"}))
    assert [*sweep.variants] == ["base", "narrow", "lr-0.01_schedule-wsd", "lr-0.02_schedule-wsd"]
    assert len(runs) == 12 and [run.seed for run in runs.values()] == [0] * 4 + [1] * 4 + [2] * 4
    narrow = runs["narrow-seed2"].config
    assert (narrow.seed, narrow.model.dim, narrow.train.prompts, narrow.train.steps) == (2, 16, ["a: b"], 7)
    assert narrow.folder == base.parent / "runs/rates/narrow-seed2" and narrow.reuse == str(base.parent / "runs/mini")
    assert runs["lr-0.02_schedule-wsd-seed0"].config.train.schedule == "wsd"


def test_variants_of_data_share_the_stages_that_they_can(base):
    same, other = "vocab_size-768_lr-", "vocab_size-896_lr-"
    sweep, _ = runs_of(write_sweep(base.parent, baseline="base", vary={
        "tokenizer.vocab_size": [768, 896], "train.lr": [0.01, 0.02]}))
    made = {name: run.config.folder.name for name, run in sweep.data.items()}
    own = made[f"{other}0.01"]
    assert own.startswith("data-") and made == {
        "base": "mini", f"{same}0.01": "mini", f"{same}0.02": "mini", f"{other}0.01": own, f"{other}0.02": own}
    more, _ = runs_of(write_sweep(base.parent, baseline="base", vary={
        "tokenizer.vocab_size": [896], "train.lr": [0.03, 0.01]}))
    assert {run.config.folder.name for run in more.data.values()} == {"mini", own}, "made once, whatever comes first"


def test_a_sweep_that_is_called_like_its_base_is_refused(base):
    (base.parent / "own").mkdir()
    path = write_sweep(base.parent / "own", base="../mini.yaml")
    refused(UserError, "runs/mini is a run.*Rename", read_sweep, path.rename(path.with_name("mini.yaml")))


@pytest.mark.parametrize(("changes", "messages"), [
    ({"baseline": "lr-1"}, ["rates.yaml", "lr-1 is no variant", "lr-0.003, lr-0.01, lr-0.03"]),
    ({"seeds": [1, 1], "vary": {"seed": [1]}}, ["several of the seed 1", "The sweep itself decides seed"]),
    ({"variants": {"a/b": {}}, "budget": {"tokens": 1}}, ["a/b cannot be"]),
    ({"budget": {"tokens": 1, "flops": 1.0}}, ["rates.yaml:3: 'budget'", "at most 1"]),
    ({"sedes": [1]}, ["rates.yaml:3: unknown key 'sedes'; did you mean 'seeds'"]),
    ({"variants": {"x": {"train.lrr": 1}, "y": {"train.warmup_steps": 99}}}, ["train.lrr", "warmup_steps 99"])])
def test_what_is_wrong_is_refused_at_once_before_anything_starts(base, capsys, changes, messages):
    error = printed(capsys, main, write_sweep(base.parent, **changes), expect=2)
    assert all(message in error for message in messages), error
    assert not (base.parent / "runs").exists()


@pytest.mark.parametrize(("mask", "ranks", "shares"), [
    ("", 1, [""]), ("4,5,7", 1, ["4", "5", "7"]), ("4,5,7", 2, ["4,5"]), (None, 2, ["0,1", "2,3"])])
def test_the_gpus_of_a_machine_are_divided_among_runs(tmp_path, monkeypatch, mask, ranks, shares):
    programs = Programs(tmp_path / "bin")
    programs.say("nvidia-smi", "0\n1\n2\n3")
    monkeypatch.setenv("PATH", str(programs.folder), prepend=os.pathsep)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if mask is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", mask)
    config = Config.model_validate({"launch": {"processes": ranks}})
    assert [place.get("CUDA_VISIBLE_DEVICES", "") for place in places(config)] == shares


def start(path, *options):
    return subprocess.Popen([sys.executable, "-m", "drover", "sweep", str(path), "--cluster", "local", *options],
                            env=environment(), stdout=subprocess.PIPE, text=True, cwd=path.parent)


@pytest.mark.slow
def test_a_sweep_that_is_killed_twice_continues_to_its_page(base, capsys):
    """One variant diverges, which stops no other. An edit of the base meanwhile changes nothing of the command that
    runs."""
    path = write_sweep(base.parent, vary={"train.lr": [0.003, 0.01]}, seeds=[0, 1],
                       variants={"wild": {"train.lr": 1e12, "train.guards.max_skipped": 0}})
    runs = base.parent / "runs/rates"
    for last in ("lr-0.003-seed0/train/metrics.jsonl", "lr-0.01-seed1/convert/manifest.json"):
        process = start(path)
        wait_for(lambda last=last: (runs / last).exists(), HANG_S)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    process = start(path, "--json")
    written = base.read_text()
    wait_for((runs / "logs/wild-seed1.log").exists, HANG_S)
    base.write_text("train: [")
    result = json.loads(process.communicate(timeout=HANG_S)[0])
    base.write_text(written)
    assert process.returncode == 0
    assert {row["variant"]: row["seeds"] for row in result["variants"]} == {
        "lr-0.01": "2 of 2", "wild": "0 of 2", "lr-0.003": "2 of 2"}
    assert "diverged with 2 of 2 seeds (0, 1)" in result["variants"][1]["decision"]
    assert result["noise"] > 0 and len(result["runs"]) == 4 and result["correction"] == "Holm"
    page = (runs / "sweep.html").read_text()
    assert page.count("<svg") == 2 and "wild with seed 1 diverged. Training stopped" in page
    shown = printed(capsys, main, path, "--status")
    assert "4 of 6 runs done, 2 diverged" in shown and "wild: diverged" in shown
    assert max(len(line) for line in shown.splitlines() if str(runs) not in line) <= 120
    write_sweep(base.parent, vary={"train.lr": [0.003, 0.01]}, seeds=[0, 1],
                variants={"other": {"tokenizer.vocab_size": 896}})
    assert "4 of 6 runs done" in printed(capsys, main, path, "--status"), "the data of a variant are not made"
    write_sweep(base.parent, vary={"train.lr": [0.003, 0.01]}, seeds=[0, 1], budget={"tokens": "8k"})
    for options, status in ((["--cluster", "local"], 2), (["--status"], 0)):
        shown = printed(capsys, main, path, *options, expect=status)
        assert "rates.yaml was changed after these runs had trained: lr-0.01-seed0" in " ".join(shown.split())


@pytest.mark.slow
def test_equal_seeds_give_equal_bytes_whatever_runs_beside_them(base):
    one = {"vary": {}, "variants": {"same": {}}, "baseline": "same", "seeds": [1]}
    paths = [write_sweep(base.parent, **one).rename(base.parent / f"{name}.yaml") for name in "abc"]
    assert start(paths[0]).wait(HANG_S) == 0
    assert {process.wait(HANG_S) for process in map(start, paths[1:])} == {0}
    alone, *together = ((weights(base, f"{name}/same-seed1"), curve(base, f"{name}/same-seed1")) for name in "abc")
    assert together == [alone, alone] and alone[0]
