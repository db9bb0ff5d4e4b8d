"""Copies at a start of training: whose store it is, what is gone on from, and that nothing stays locked."""

import json
import shutil
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from drover.pipeline.config.training import CheckpointConfig
from drover.pipeline.copies.checkpoints import COPY, CopiedCheckpoints
from drover.pipeline.copies.claim import LOCK, RUN, Lock
from drover.pipeline.errors import UserError
from drover.pipeline.files import renamed
from drover.pipeline.records.checkpoints import CHECKPOINTS, MARKER, checkpoint_name
from drover.pipeline.stores.store import Store
from drover.pipeline.training import uploads as module
from drover.pipeline.training.async_saver import AsyncSaver
from drover.pipeline.training.checkpoint import Checkpoints
from drover.pipeline.training.data.token_check import SET_ASIDE
from drover.pipeline.training.loop import Loop
from drover.pipeline.training.uploads import Uploads
from tests.training.uploads.saving import Log, save
from tests.waiting import wait_for


class Run:
    """A train folder and the store that it is copied to; `start` is a start of training."""

    def __init__(self, folder, store, ranks, name="mini"):
        self.store, self.folder, self.ranks, self.name, self.said = store, folder, ranks, name, []
        self.copies, self.config = CopiedCheckpoints(store), CheckpointConfig(keep=3, copy_to=store.url)
        self.checkpoints = Checkpoints(folder / CHECKPOINTS, ranks, self.said.append)
        (folder / CHECKPOINTS).mkdir(parents=True, exist_ok=True)

    def start(self):
        config = SimpleNamespace(name=self.name, train=SimpleNamespace(checkpoint=self.config))
        work = SimpleNamespace(config=config, folder=self.folder, fingerprint={}, drift=[], afresh=False)
        return Uploads(work, self.ranks, self.checkpoints, self.said.append, Log())

    def at(self, folder, name, store=None):
        """The same run, or a copy of it, in another folder."""
        return Run(folder, store or self.store, self.ranks, name)

    def train(self, *steps):
        """Save after these steps and copy each; leave the store."""
        copying = self.start()
        copying.begin(copying.newest_valid())
        saver = AsyncSaver(self.checkpoints, self.ranks, self.config, {}, self.said.append, Log(), copying.saved)
        for step in steps:
            save(saver, step)
            wait_for(lambda step=step: step in self.copies.found().whole)
        copying.finish(steps[-1])

    def remove_here(self, step):
        path = self.checkpoints.path(step)
        path.rename(self.folder / path.name)


@pytest.fixture
def run(tmp_path, ranks):
    return Run(tmp_path / "train", Store(f"file://{tmp_path}/store"), ranks)


@pytest.mark.parametrize("last", ["weights.bin", COPY])
def test_folders_that_nobody_has_claimed_are_left_alone(run, last):
    run.store.put(f"step-7/{last}", b"somebody else's")
    with pytest.raises(UserError, match=r"folders named after steps \(step-00000007 \.\.\.\), but no run\.json"):
        run.start()
    assert [entry.path for entry in run.store.list()] == [f"step-7/{last}"]
    run.store.delete([f"step-7/{last}"])
    run.train(4)
    run.store.put("step-00000008/half", b"ours")
    run.start().close()
    assert run.copies.found().whole == [4] and not run.copies.found().unfinished


@pytest.mark.parametrize("name", [MARKER, COPY])
def test_a_damaged_copy_gives_way_to_the_one_before_unless_there_is_as_new_a_checkpoint_here(run, name):
    run.train(4, 8)
    run.store.put(f"{checkpoint_name(8)}/{name}", b"{")
    copying = run.start()
    assert copying.newest_valid()[1].step == 8
    copying.close()
    run.remove_here(8)
    copying = run.start()
    assert copying.newest_valid()[1].step == copying.uploaded == 4
    copying.close()
    assert run.copies.found().whole == [4]
    run.store.put(f"{checkpoint_name(4)}/{name}", b"{")
    run.remove_here(4)
    copying = run.start()
    with pytest.raises(UserError, match=r"Every copy of a checkpoint in .* is damaged"):
        copying.newest_valid()
    copying.close()


def test_what_fails_after_the_lock_was_taken_leaves_none_behind(run, monkeypatch):
    def fail(self, steps):
        raise UserError("the store is away.")
    with monkeypatch.context() as patch, pytest.raises(UserError, match="away"):
        patch.setattr(Uploads, "_remove", fail)
        run.start()
    assert run.store.head(RUN) is not None and run.store.head(LOCK) is None
    copying = run.start()
    copying.begin(None)
    assert run.store.head(LOCK) is not None
    for _ in range(2):
        copying.close()
    assert run.store.head(LOCK) is None


@pytest.mark.parametrize("error", [UserError("other settings"), OSError("no space left")])
def test_a_loop_that_cannot_be_set_up_leaves_the_store(run, monkeypatch, error):
    def meet(self):
        self.uploads = run.start()
        assert run.store.head(LOCK) is not None
        raise error
    monkeypatch.setattr(Loop, "_meet", meet)
    with pytest.raises(type(error)):
        Loop(SimpleNamespace(config=None), None)
    assert run.store.head(LOCK) is None


def test_a_copy_of_a_repeated_step_is_kept_although_the_step_was_once_set_aside(run):
    run.train(4, 8)
    run.remove_here(8)
    aside = run.folder / CHECKPOINTS / f"{module.SET_ASIDE}{checkpoint_name(8)}"
    aside.mkdir()
    (aside / MARKER).write_text("of the damaged checkpoint")
    copying = run.start()
    assert copying.newest_valid()[1].step == 8 and run.copies.found().whole == [4, 8]
    copying.close()


@pytest.mark.parametrize("away", [False, True])
def test_copies_of_damaged_training_are_taken_back_at_once_or_by_the_next_start(run, monkeypatch, away):
    run.train(4, 8, 12)
    copying = run.start()
    copying.begin(copying.newest_valid())
    with monkeypatch.context() as patch:
        if away:
            patch.setattr(CopiedCheckpoints, "found", Mock(side_effect=UserError("the store is away.")))
        copying.withdraw(4)
    copying.saved(16)
    copying.close()
    assert run.copies.found().whole == ([4, 8, 12] if away else [4])
    assert any("the next start does it" in text for text in run.said) == away
    for step in (8, 12):
        renamed(path := run.checkpoints.path(step), f"{SET_ASIDE}{path.name}")
    copying = run.start()
    assert copying.newest_valid()[1].step == 4 and run.copies.found().whole == [4]
    copying.close()


def test_a_copy_of_a_living_run_s_folder_does_not_take_its_store(run, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "Lock", partial(Lock, beat_s=0.05, dead_s=1000.0))
    run.train(4)
    living, copied = run.start(), tmp_path / "copied"
    shutil.copytree(run.folder, copied)
    before = {entry.path: run.store.read(entry.path) for entry in run.store.list() if entry.path != LOCK}
    with pytest.raises(UserError, match="is in use: process"):
        run.at(copied, "mini").start()
    with pytest.raises(UserError, match=r"of the run mini, not of trial\. .*/copied seems to be a copy"):
        run.at(copied, "trial").start()
    run.at(copied, "trial", Store(f"file://{tmp_path}/other")).train(8)  # a store of its own: another training
    with pytest.raises(UserError, match="of the run mini, not of trial"):
        run.at(copied, "trial").start()
    assert {path: run.store.read(path) for path in before} == before and living._lock.held()
    living.close()


def test_a_killed_run_goes_on_at_once_where_it_is_and_after_a_wait_where_it_was_moved(run, tmp_path, monkeypatch):
    run.train(4)
    killed = [run.start()]
    killed.append(run.start())
    run.folder.rename(tmp_path / "renamed")
    renamed = run.at(tmp_path / "renamed", "other")
    killed.append(renamed.start())
    assert not [text for text in run.said + renamed.said if "locked by" in text]
    assert json.loads(run.store.read(RUN))["name"] == "other"
    shutil.copytree(tmp_path / "renamed", tmp_path / "moved")  # to another disk
    moved = run.at(tmp_path / "moved", "other")
    monkeypatch.setattr(module, "Lock", partial(Lock, dead_s=0.1))
    copying = moved.start()
    assert "took over" in moved.said[-1] and copying.newest_valid()[1].step == 4
    for one in [*killed, copying]:
        one.close()
    moved.train(8)
    assert moved.copies.found().whole == [4, 8]


def test_however_short_the_patience_the_last_copy_is_waited_for(run, monkeypatch):
    run.train(4)
    copying = run.start()
    copying.begin(copying.newest_valid())
    copying.ranks = SimpleNamespace(patience=timedelta(minutes=2), by_leader=run.ranks.by_leader)
    waited = []
    monkeypatch.setattr(Uploads, "_wait_here", lambda self, step, limit: waited.append(limit) or "")
    copying.finish(4)
    assert waited == [timedelta(minutes=1)]
