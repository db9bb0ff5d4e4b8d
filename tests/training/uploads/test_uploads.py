"""Copies at a start of training: whose store it is, what is gone on from, and that nothing stays locked."""

import json
import shutil
from datetime import timedelta
from types import SimpleNamespace

import pytest

from drover.pipeline.core.errors import UserError
from drover.pipeline.core.files import renamed
from drover.pipeline.records.checkpoints import MARKER, checkpoint_name
from drover.pipeline.storage.mirror import COPY, OWNER
from drover.pipeline.storage.store import Store
from drover.pipeline.training.uploads import SET_ASIDE, Uploads
from tests.refusal import refused
from tests.training.uploads.saving import after


@pytest.mark.parametrize("last", ["weights.bin", COPY])
def test_folders_that_nobody_has_claimed_are_left_alone(run, last):
    run.store.put(f"step-7/{last}", b"somebody else's")
    refused(UserError, r"folders named after steps \(step-00000007 \.\.\.\), but no owner\.json", run.start)
    assert [entry.path for entry in run.store.list()] == [f"step-7/{last}"]
    run.store.delete([f"step-7/{last}"])
    run.train(4)
    run.store.put("step-00000008/half", b"ours")
    run.start()
    assert run.complete == [4] and not run.copies.list().unfinished
    assert "removed incomplete copies of an earlier start" in run.printed[-1]


@pytest.mark.parametrize("name", [MARKER, COPY])
def test_a_damaged_copy_gives_way_to_the_one_before_unless_there_is_as_new_a_checkpoint_here(run, name):
    run.train(4, 8)
    run.store.put(f"{checkpoint_name(8)}/{name}", b"{")
    assert run.gone_on_from() == 8
    run.remove_here(8)
    assert run.gone_on_from() == run.uploads.uploaded == 4
    assert run.complete == [4]
    run.store.put(f"{checkpoint_name(4)}/{name}", b"{")
    run.remove_here(4)
    copying = run.start()
    refused(UserError, r"Every copy of a checkpoint in .* is damaged", copying.newest_valid)


def test_a_copy_of_a_repeated_step_is_kept_although_the_step_was_once_set_aside(run):
    run.train(4, 8)
    run.remove_here(8)
    aside = run.checkpoints.folder / f"{SET_ASIDE}{checkpoint_name(8)}"
    aside.mkdir()
    (aside / MARKER).write_text("of the damaged checkpoint")
    assert run.gone_on_from() == 8 and run.complete == [4, 8]


def test_copies_of_checkpoints_that_were_set_aside_are_removed_by_the_next_start(run):
    run.train(4, 8, 12)
    for step in (8, 12):
        renamed(path := run.checkpoints.path(step), f"{SET_ASIDE}{path.name}")
    assert run.gone_on_from() == 4 and run.complete == [4]


def test_a_copy_of_a_run_s_folder_takes_its_store_only_under_its_name(run, tmp_path):
    run.train(4)
    living = run.start()
    copied = tmp_path / "copied"
    shutil.copytree(run.folder, copied)
    before = {entry.path: run.store.read(entry.path) for entry in run.store.list()}
    refused(UserError, r"of the run mini, not of trial\. .*/copied seems to be a copy", run.at(copied, "trial").start)
    run.at(copied, "trial", Store(f"file://{tmp_path}/other")).train(8)  # a store of its own: another training
    refused(UserError, "of the run mini, not of trial", run.at(copied, "trial").start)
    assert {path: run.store.read(path) for path in before} == before
    living._owner.refuse_lost()
    shutil.copytree(run.folder, tmp_path / "second")
    second = run.at(tmp_path / "second", "mini")
    second.start()
    assert "takes over" in second.printed[-1]
    refused(UserError, "took it over", living._owner.refuse_lost)


def test_a_killed_run_goes_on_at_once_where_it_is_and_where_it_was_moved(run, tmp_path):
    run.train(4)
    run.start()
    run.start()
    run.folder.rename(tmp_path / "renamed")
    renamed = run.at(tmp_path / "renamed", "other")
    renamed.start()
    assert not [text for text in run.printed + renamed.printed if "takes over" in text]
    assert json.loads(run.store.read(OWNER))["name"] == "other"
    shutil.copytree(tmp_path / "renamed", tmp_path / "moved")  # to another disk
    moved = run.at(tmp_path / "moved", "other")
    copying = moved.start()
    assert "takes over" in moved.printed[-1] and copying.newest_valid()[1].step == 4
    moved.train(8)
    assert moved.complete == [4, 8]


def test_however_short_the_patience_the_last_copy_is_waited_for(run, monkeypatch):
    run.train(4)
    copying = run.begin().uploads
    copying.ranks = SimpleNamespace(patience=timedelta(minutes=2))
    waited = []
    monkeypatch.setattr(Uploads, "_wait", lambda self, step, limit: waited.append(limit) or "")
    copying.on_finish(after(4))
    assert waited == [timedelta(minutes=1)]
