"""A saver and its copier, and a store that can be held back, for the tests of copies."""

import threading
from pathlib import Path

import torch

from pipeline.config.training import CheckpointConfig
from pipeline.copies.checkpoints import CopiedCheckpoints
from pipeline.copies.claim import LOCK
from pipeline.errors import UserError
from pipeline.formats.sharded_tensors import whole
from pipeline.records.checkpoints import CHECKPOINTS, TrainingProgress
from pipeline.stores.store import Store
from pipeline.training.async_saver import AsyncSaver
from pipeline.training.checkpoint import Checkpoints
from pipeline.training.uploads import Uploader
from tests.waiting import wait_for


class Gate:
    """Holds back what is put into a store; `failing` makes it fail."""

    def __init__(self, monkeypatch):
        self.open, self.failing, self.reached, self.before = threading.Event(), False, threading.Event(), ""
        self.open.set()
        put = Store.put

        def gated(store, path, data, **condition):
            if path.endswith(self.before):
                self.reached.set()
                self.open.wait()
            if self.failing:
                raise UserError("the store is away.")
            return put(store, path, data, **condition)
        monkeypatch.setattr(Store, "put", gated)


class Log(list):
    """Events, as (name, details)."""

    def __call__(self, name, **details):
        self.append((name, details))

    def names(self):
        return [name for name, _ in self]


def parts_of(tmp_path, ranks, url, lock):
    said, log = [], Log()
    config = CheckpointConfig(keep=1, attempts=2)
    copies = CopiedCheckpoints(Store(url))
    checkpoints = Checkpoints(tmp_path / "train" / CHECKPOINTS, ranks, said.append, lambda step: copier.needs(step))
    copier = Uploader(copies, lock, ranks, config, tmp_path / "train", checkpoints.path, said.append, log, -1)
    saver = AsyncSaver(checkpoints, ranks, config, {}, said.append, log, copier.put)
    return saver, copier, copies, said


def save(saver, *steps):
    for step in steps:
        saver.save({"model.a": [whole(torch.full((3, 5), float(step)))]}, TrainingProgress(step=step))
        saver.wait()


def save_held(saver, gate, step, before=""):
    """Save, and return when the copy has come to an object whose path ends so."""
    gate.before = before
    gate.reached.clear()
    gate.open.clear()
    save(saver, step)
    gate.reached.wait()


def save_copied(saver, copier, *steps):
    """Save, and wait for the copy of each."""
    for step in steps:
        save(saver, step)
        wait_for(lambda step=step: copier.uploaded == step)


def kept(saver):
    return sorted(int(path.name[5:]) for path in saver.checkpoints.folder.iterdir())


def store_put_as_another(store):
    """Beside the gate, which holds back what goes through the store."""
    (Path(store.url.removeprefix("file://")) / LOCK).write_text('{"token": "b"}')
