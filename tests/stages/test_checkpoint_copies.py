"""Checkpoints copied to an object store while training goes on, and training that goes on from them elsewhere."""

from __future__ import annotations

import json
import resource
import shutil
import signal
from pathlib import Path

import pytest
import torch

from pipeline.contract.manifest import read_manifest
from pipeline.copies.checkpoints import CopiedCheckpoints
from pipeline.copies.claim import LOCK
from pipeline.files import read_lines
from pipeline.formats.sharded_tensors import CheckpointReader
from pipeline.stores.store import Store
from tests.conftest import run_stage
from tests.object_store import SECRET
from tests.stages.training import curve, events, kill, proven, reusing, start, texts, train_folder
from tests.waiting import wait_for

SETTINGS = ["train.steps=16", "train.checkpoint.keep=2"]


def copies(url: str) -> CopiedCheckpoints:
    return CopiedCheckpoints(Store(url))


def stored_tensors(config: Path, name: str = "mini") -> dict[str, torch.Tensor]:
    """Weights, moments and generators of the last checkpoint."""
    newest = max((train_folder(config, name) / "checkpoints").glob("step-????????"))
    with CheckpointReader(newest) as reader:
        return {tensor: reader.read(tensor) for tensor in reader.names()}


def assert_equal_to_the_bit(config: Path, name: str = "mini", to: str = "whole") -> None:
    assert curve(config, name) == curve(config, to) and texts(config, name) == texts(config, to)
    found, expected = stored_tensors(config, name), stored_tensors(config, to)
    assert found.keys() == expected.keys() and any(tensor.startswith("exp_avg_sq.") for tensor in found)
    assert all(torch.equal(found[tensor], expected[tensor]) for tensor in expected)


def train_until_copied(config: Path, url: str, step: int, *settings: str, how: int, ranks: int = 2) -> None:
    """Train as far as the second step after `step`, and signal it once the copy of `step` is whole."""
    process = start(config, *SETTINGS, f"train.checkpoint.copy_to={url}", *settings, ranks=ranks,
                    faults=f"wait:rank=0,step={step + 3}")
    try:
        wait_for(lambda: step in copies(url).found().whole, of=process)
    finally:
        kill(process, how)


def test_a_run_whose_folder_is_lost_goes_on_from_the_store_and_equals_one_that_never_left(fresh, seaweed):
    url = seaweed.url_of("runs/mini")
    run_stage("train", fresh, "name=whole", *SETTINGS, ranks=2)
    train_until_copied(fresh, url, 8, how=signal.SIGTERM)
    assert not (train_folder(fresh) / "manifest.json").exists() and Store(url).head(LOCK) is None
    shutil.rmtree(train_folder(fresh))
    said = run_stage("train", fresh, *SETTINGS, f"train.checkpoint.copy_to={url}", ranks=2).stdout
    assert "fetching step-000000" in said and f"from {url}" in said
    assert_equal_to_the_bit(fresh)
    assert proven(fresh)
    told = [event["event"] for event in read_lines(train_folder(fresh) / "events.jsonl")]
    assert told.index("start") < told.index("checkpoint_copied") < told.index("checkpoint_fetched")
    assert copies(url).found().whole == [12, 16] and not copies(url).found().unfinished
    copied = events(fresh, "checkpoint_copied")[-1]
    assert copied["bytes"] > 500_000 and copied["seconds"] > 0 and copied["behind_s"] >= 0
    assert Store(url).head(LOCK) is None
    kept = "".join(path.read_text(errors="replace") for path in fresh.parent.rglob("*")
                   if path.is_file() and path.suffix in (".json", ".jsonl", ".yaml"))
    assert SECRET not in kept and SECRET not in said

    # Another number of ranks, and not one file but what is in the store.
    shutil.rmtree(train_folder(fresh))
    run_stage("train", fresh, *SETTINGS, f"train.checkpoint.copy_to={url}", ranks=1)
    assert_equal_to_the_bit(fresh)
    manifest = read_manifest(train_folder(fresh))
    assert manifest is not None and manifest.counts["steps"] == 16


def test_what_a_kill_left_of_a_copy_does_not_count_and_goes(fresh, moto_server):
    url = moto_server.url_of("runs/mini")
    run_stage("train", fresh, "name=whole", *SETTINGS)
    hanging = moto_server.fail("delay", 1, method="PUT", path="step-00000008/index.json", seconds=5)
    process = start(fresh, *SETTINGS, f"train.checkpoint.copy_to={url}", faults="wait:rank=0,step=11")
    try:
        wait_for(lambda: hanging.met and len(copies(url).found().unfinished.get(8, [])), of=process)
    finally:
        kill(process)
    found = copies(url).found()
    assert found.whole == [4] and list(found.unfinished) == [8] and Store(url).head(LOCK) is not None
    shutil.rmtree(train_folder(fresh) / "checkpoints")
    said = run_stage("train", fresh, *SETTINGS, f"train.checkpoint.copy_to={url}").stdout
    assert "copied in part" in said and "step-00000008" in said and "continuing after step 4" in said
    assert_equal_to_the_bit(fresh)
    assert copies(url).found().whole == [12, 16] and not copies(url).found().unfinished and proven(fresh)


@pytest.mark.parametrize("of", ["moto_server", pytest.param("google", marks=pytest.mark.soak),
                                pytest.param("azurite", marks=pytest.mark.soak)])
def test_a_store_that_stumbles_costs_nothing_but_time(fresh, of, request):
    """Answers 500 and 503, and connections that are cut, while it is copied and while it is fetched."""
    bucket = request.getfixturevalue(of)
    url = bucket.url_of("runs/mini")
    run_stage("train", fresh, "name=whole", *SETTINGS)
    faults = [bucket.fail("error", 3, method="PUT", path="step-0"),
              bucket.fail("slow down", 3, method="PUT", path="step-0")]
    train_until_copied(fresh, url, 8, how=signal.SIGTERM, ranks=1)
    shutil.rmtree(train_folder(fresh))
    faults += [bucket.fail("cut", 2, method="GET", path="safetensors"),
               bucket.fail("error", 2, method="GET", path="safetensors")]
    run_stage("train", fresh, *SETTINGS, f"train.checkpoint.copy_to={url}")
    assert all(fault.met == fault.times for fault in faults)
    assert_equal_to_the_bit(fresh)
    assert not events(fresh, "checkpoint_copy_failed")


def test_a_copy_that_fails_is_said_and_training_goes_on(fresh, moto_server):
    url, copying = moto_server.url_of("runs/mini"), [*SETTINGS, "train.checkpoint.attempts=1"]
    run_stage("train", fresh, "name=whole", *SETTINGS)
    moto_server.fail("refuse", 1000, method="PUT", path="step-0000000[48]/rank")
    last = moto_server.fail("refuse", 1000, method="PUT", path="step-000000(12|16)/copy.json")
    result = run_stage("train", fresh, *copying, f"train.checkpoint.copy_to={url}", expect=2)
    assert "step-00000004 could not be copied" in result.stdout and "Training goes on" in result.stdout
    assert "The last checkpoint could not be copied" in result.stderr and url in result.stderr
    assert events(fresh, "checkpoint_copy_failed")[0]["step"] == 4
    assert curve(fresh) == curve(fresh, "whole") and read_manifest(train_folder(fresh)) is None
    assert not copies(url).found().whole

    last.times = 0
    moto_server.server.faults.clear()
    result = run_stage("train", fresh, *copying, f"train.checkpoint.copy_to={url}")
    assert copies(url).found().whole == [16] and not copies(url).found().unfinished
    assert read_manifest(train_folder(fresh)) is not None
    assert_equal_to_the_bit(fresh)


@pytest.mark.parametrize("of", ["seaweed", "google", "azurite"])
def test_a_wrong_secret_is_told_at_the_start(fresh, of, request, monkeypatch):
    bucket = request.getfixturevalue(of)
    name, wrong = bucket.key
    monkeypatch.setenv(name, wrong)
    url = bucket.url_of("runs/mini")
    result = run_stage("train", fresh, *SETTINGS, f"train.checkpoint.copy_to={url}", ranks=2, expect=2)
    assert result.stderr.count("stops here") == 1 and bucket.url in result.stderr and name in result.stderr
    assert wrong not in result.stdout + result.stderr
    assert not list((train_folder(fresh)).glob("checkpoints/*"))


@pytest.fixture(scope="module")
def once(tmp_path_factory, encoded) -> tuple[Path, str]:
    """Config of a run that is done, and where its checkpoints were copied to: steps 8, 12, 16 of one rank."""
    folder = tmp_path_factory.mktemp("copied")
    path = reusing(encoded, folder)
    run_stage("train", path, "name=whole", *SETTINGS)
    run_stage("train", path, *SETTINGS, "train.checkpoint.keep=1", "train.checkpoint.permanent_every=8",
              f"train.checkpoint.copy_to=file://{folder}/store")
    return path, str(folder / "store")


@pytest.fixture
def copied(once, tmp_path) -> tuple[Path, Path]:
    """The same for a test alone: config of a run without a train folder, and the folder that is its store."""
    import yaml
    config, store = yaml.safe_load(once[0].read_text()), tmp_path / "store"
    shutil.copytree(once[1], store)
    config["runs_dir"] = str(tmp_path / "runs")
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs/whole").symlink_to(once[0].parent / "runs/whole")
    path = tmp_path / "mini.yaml"
    path.write_text(yaml.safe_dump(config))
    return path, store


def resumed(copied: tuple[Path, Path], *settings: str, **options):
    url = f"file://{copied[1]}"
    return run_stage("train", copied[0], *SETTINGS, f"train.checkpoint.copy_to={url}", *settings, **options)


def test_the_store_keeps_what_the_folder_keeps(once):
    assert copies(f"file://{once[1]}").found().whole == [8, 16]
    kept = sorted(path.name for path in (train_folder(once[0]) / "checkpoints").iterdir())
    assert kept == ["step-00000008", "step-00000016"]


def test_a_damaged_copy_is_named_and_the_one_before_it_is_fetched(copied):
    part = copied[1] / "step-00000016/rank-00000.safetensors"
    data = bytearray(part.read_bytes())
    data[-5] ^= 1
    part.write_bytes(data)
    said = resumed(copied).stdout
    assert "the copy of step-00000016 is damaged" in said and "other content" in said
    assert "continuing after step 8" in said
    assert_equal_to_the_bit(copied[0])


def test_where_every_copy_is_damaged_training_does_not_begin_anew(copied):
    for step in (8, 16):
        (copied[1] / f"step-000000{step:02}/index.json").unlink()
    result = resumed(copied, expect=2)
    assert "Every copy of a checkpoint" in result.stderr and "index.json is missing" in result.stdout
    assert not list((train_folder(copied[0]) / "checkpoints").iterdir())


def test_a_sound_copy_takes_the_place_of_a_damaged_checkpoint(copied):
    resumed(copied)
    (train_folder(copied[0]) / "manifest.json").unlink()
    (train_folder(copied[0]) / "checkpoints/step-00000016/index.json").write_text("{}")
    said = resumed(copied).stdout
    assert "step-00000016 is damaged" in said and "fetching step-00000016" in said
    assert_equal_to_the_bit(copied[0])


def test_a_disk_that_fills_up_while_a_copy_is_fetched_is_named(copied):
    result = resumed(copied, expect=2, limits={resource.RLIMIT_FSIZE: 100_000})
    assert "full" in result.stderr and "step-00000016.tmp" in result.stderr
    assert not list((train_folder(copied[0]) / "checkpoints").iterdir())
    assert "continuing after step 16" in resumed(copied).stdout


def test_checkpoints_of_another_run_are_refused_by_name(copied):
    before = {path: path.read_bytes() for path in copied[1].rglob("*") if path.is_file()}
    other = resumed(copied, "name=other", expect=2).stderr
    assert "holds the checkpoints of the run mini, not of other" in other
    changed = resumed(copied, "train.lr=0.02", expect=2).stderr
    assert "train.lr: 0.01 -> 0.02" in changed
    run_stage("train", copied[0], *SETTINGS)
    apart = resumed(copied, "train.steps=20", "--accept-drift", expect=2).stderr
    assert "they began apart" in apart
    forced = resumed(copied, "--force", expect=2).stderr
    assert "--force leaves behind" in forced
    assert {path: path.read_bytes() for path in copied[1].rglob("*") if path.is_file()} == before


def test_copying_can_begin_later_and_a_longer_run_goes_on_in_the_store(copied):
    place = copied[1].parent / "elsewhere"
    run_stage("train", copied[0], *SETTINGS)
    (train_folder(copied[0]) / "manifest.json").unlink()
    url = f"train.checkpoint.copy_to=file://{place}"
    run_stage("train", copied[0], *SETTINGS, url)
    assert copies(f"file://{place}").found().whole == [16]
    run_stage("train", copied[0], url, "train.steps=20", "--accept-drift")
    assert copies(f"file://{place}").found().whole == [16, 20]
    drift = read_manifest(train_folder(copied[0])).drift
    shutil.rmtree(train_folder(copied[0]))
    run_stage("train", copied[0], url, "train.steps=20")
    assert read_manifest(train_folder(copied[0])).drift == drift != []
    assert json.loads((place / "run.json").read_text())["drift"] == drift


def test_copies_of_checkpoints_that_were_set_aside_are_not_gone_on_from(copied):
    """The tokens that they were made of were found to be damaged, and the store could not be told then."""
    resumed(copied)
    folder = train_folder(copied[0])
    (folder / "manifest.json").unlink()
    checkpoints = folder / "checkpoints"
    (checkpoints / "step-00000016").rename(checkpoints / "set-aside-step-00000016")
    said = resumed(copied).stdout
    assert "removed the copy of step-00000016" in said and "continuing after step 8" in said
    assert_equal_to_the_bit(copied[0])
