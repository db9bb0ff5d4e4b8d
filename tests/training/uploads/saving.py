"""A saver and its copier, and a store that can be held back, for the tests of copies."""

import threading
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import torch

from drover.pipeline.config.training import CheckpointConfig
from drover.pipeline.core.errors import UserError
from drover.pipeline.records.checkpoints import CHECKPOINTS, TrainingProgress
from drover.pipeline.storage.mirror import OWNER
from drover.pipeline.storage.store import Store
from drover.pipeline.training.async_saver import AsyncSaver
from drover.pipeline.training.checkpoint import Checkpoints
from drover.pipeline.training.copied_checkpoints import CopiedCheckpoints
from drover.pipeline.training.uploads import Uploads
from tests.formats.cutting import whole
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


def parts_of(folder, ranks, url):
    """A saver, the uploads that it tells, what is in their store, and what was said."""
    said, log, config = [], Log(), CheckpointConfig(keep=1, attempts=2, copy_to=url)
    (folder / CHECKPOINTS).mkdir(parents=True, exist_ok=True)
    checkpoints = Checkpoints(folder / CHECKPOINTS, ranks, said.append, lambda step: uploads.needs(step))
    work = SimpleNamespace(config=SimpleNamespace(name="mini", train=SimpleNamespace(checkpoint=config)),
                           folder=folder, fingerprint={}, drift=[], afresh=False)
    uploads = Uploads(work, ranks, checkpoints, url, said.append, log)
    uploads.on_start(SimpleNamespace(has_checkpoint=False))
    return AsyncSaver(checkpoints, ranks, config, {}, said.append, log, uploads.on_saved), uploads, \
        CopiedCheckpoints(Store(url)), said


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
    (Path(store.url.removeprefix("file://")) / OWNER).write_text('{"format": 1, "name": "mini", "writer": "b"}')


def waited(uploads, step, limit_s=1000.0):
    """Wait for the copy of the last checkpoint; why there is none."""
    return uploads._wait(step, timedelta(seconds=limit_s))
