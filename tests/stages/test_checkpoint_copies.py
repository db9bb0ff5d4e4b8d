"""Checkpoints copied to an object store while training goes on, and training that goes on from them elsewhere."""

import resource
import shutil

import pytest

from drover.pipeline.storage.store import Store
from drover.pipeline.training.uploads import CopiedCheckpoints
from tests.stages.training import assert_equal_to_the_bit, events, manifest_of, reusing, run_train, train_folder

SETTINGS = ["train.steps=16", "train.checkpoint.keep=2"]


def copies(url):
    """What is in a store of checkpoints."""
    return CopiedCheckpoints(Store(url)).list()


@pytest.fixture(scope="module")
def once(tmp_path_factory, encoded):
    """Config of a run that is done, copied into the folder `store` beside it: steps 8 and 16 of one rank."""
    path = reusing(encoded, tmp_path_factory.mktemp("copied"))
    run_train(path, *SETTINGS, "train.checkpoint.keep=1", "train.checkpoint.permanent_every=8",
              f"train.checkpoint.copy_to=file://{path.parent}/store")
    assert copies(f"file://{path.parent}/store").complete == [8, 16]
    assert sorted(step.name for step in (train_folder(path) / "checkpoints").iterdir()) == [
        "step-00000008", "step-00000016"]
    return path


@pytest.fixture
def fresh(once, encoded, tmp_path):
    """Config of the same run before train; the one that is done is beside it, as `whole`."""
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs/whole").symlink_to(once.parent / "runs/mini")
    return reusing(encoded, tmp_path)


@pytest.fixture
def copied(fresh, once):
    """The same, and the folder `store` beside it."""
    shutil.copytree(once.parent / "store", fresh.parent / "store")
    return fresh


def resumed(copied, *settings, **options):
    return run_train(copied, *SETTINGS, f"train.checkpoint.copy_to=file://{copied.parent}/store", *settings, **options)


def test_damaged_copies_and_checkpoints_give_way_to_sound_ones(copied):
    """Also after a disk that filled up while a copy was fetched."""
    result = resumed(copied, expect=2, limits={resource.RLIMIT_FSIZE: 100_000})
    assert "full" in result.stderr and "step-00000016.tmp" in result.stderr
    assert not list((train_folder(copied) / "checkpoints").iterdir())
    part = copied.parent / "store/step-00000016/rank-00000.safetensors"
    part.write_bytes(part.read_bytes()[:-1] + b"!")
    output = resumed(copied).stdout
    assert "the copy of step-00000016 is damaged" in output and "other content" in output
    assert "continuing after step 8" in output
    (train_folder(copied) / "manifest.json").unlink()
    (train_folder(copied) / "checkpoints/step-00000016/index.json").write_text("{}")
    output = resumed(copied).stdout
    assert "step-00000016 is damaged" in output and "fetching step-00000016" in output
    assert_equal_to_the_bit(copied)


@pytest.mark.slow
def test_a_copy_that_fails_is_said_and_training_goes_on(fresh, moto_server):
    url = moto_server.url_of("runs/mini")
    copying = [*SETTINGS, "train.checkpoint.attempts=1", f"train.checkpoint.copy_to={url}"]
    moto_server.fail("refuse", 1000, method="PUT", path="step-0000000[48]/rank")
    moto_server.fail("refuse", 1000, method="PUT", path="step-000000(12|16)/copy.json")
    result = run_train(fresh, *copying, expect=2)
    assert "step-00000004 could not be copied" in result.stdout and "Training continues" in result.stdout
    assert "The last checkpoint could not be copied" in result.stderr and url in result.stderr
    assert events(fresh, "checkpoint_copy_failed")[0]["step"] == 4
    assert manifest_of(fresh) is None and not copies(url).complete

    moto_server.server.faults.clear()
    run_train(fresh, *copying)
    assert copies(url).complete == [16] and not copies(url).unfinished
    assert_equal_to_the_bit(fresh)


@pytest.mark.slow
def test_checkpoints_of_another_training_are_refused_with_what_differs(copied):
    """Those of a run of another name: tests/training/test_uploads.py."""
    def stored():
        return {path: path.read_bytes() for path in (copied.parent / "store").rglob("*") if path.is_file()}
    before = stored()
    for setting, message in (("train.lr=0.02", "train.lr: 0.01 -> 0.02"), ("--force", "without --force, training")):
        assert message in resumed(copied, setting, expect=2).stderr
    run_train(copied, *SETTINGS)
    assert "they were started separately" in resumed(copied, "train.steps=20", "--accept-changes", expect=2).stderr
    assert stored() == before
