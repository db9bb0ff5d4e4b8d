"""Runs whose checkpoints are saved and copied, and a store that can be held back, for the tests of copies."""

import threading
from datetime import timedelta
from types import SimpleNamespace

import torch

from drover.pipeline.config.training import CheckpointConfig
from drover.pipeline.core.errors import UserError
from drover.pipeline.records.checkpoints import CHECKPOINTS, TrainingProgress
from drover.pipeline.storage.store import Store
from drover.pipeline.training.checkpoints import AsyncSaver, Checkpoints
from drover.pipeline.training.uploads import CopiedCheckpoints, Uploads
from tests.formats.cutting import whole
from tests.waiting import wait_for


class Gate:
    """Holds back what is put into a store; `failing` makes it fail."""

    def __init__(self, monkeypatch):
        self.open = threading.Event()
        self.failing = False
        self.reached = threading.Event()
        self.before = ""
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


def save(saver, *steps):
    for step in steps:
        saver.save({"model.a": [whole(torch.full((3, 5), float(step)))]}, TrainingProgress(step=step))
        saver.wait()


def after(step):
    """As much of the loop as uploads ask, after so many steps."""
    return SimpleNamespace(has_checkpoint=True, progress=SimpleNamespace(step=step))


class Run:
    """A train folder and the store that it is copied to; `start` is a start of training."""

    def __init__(self, folder, store, ranks, name="mini", keep=3):
        self.store = store
        self.folder = folder
        self.ranks = ranks
        self.name = name
        self.printed = []
        self.log = Log()
        self.started = []
        self.copies = CopiedCheckpoints(store)
        self.config = CheckpointConfig(keep=keep, attempts=2, copy_to=store.url)
        (folder / CHECKPOINTS).mkdir(parents=True, exist_ok=True)
        self.checkpoints = Checkpoints(folder / CHECKPOINTS, ranks, self.printed.append,
                                       lambda step: self.uploads.needs(step))

    @property
    def complete(self):
        """The steps of which the store has a whole copy."""
        return self.copies.list().complete

    def start(self):
        config = SimpleNamespace(name=self.name, train=SimpleNamespace(checkpoint=self.config))
        work = SimpleNamespace(config=config, folder=self.folder, fingerprint={}, accepted=[], from_scratch=False)
        self.uploads = Uploads(work, self.checkpoints, self.store.url, self.log)
        self.started.append(self.uploads)
        return self.uploads

    def gone_on_from(self):
        """The step that a start goes on from."""
        return self.start().newest_valid()[1].step

    def begin(self):
        """A start that saves and copies, after what it finds."""
        result = self.start().newest_valid()
        self.uploads.on_start(after(result[1].step) if result else SimpleNamespace(has_checkpoint=False))
        self.saver = AsyncSaver(self.checkpoints, self.config, {}, self.log, self.uploads.on_saved)
        return self

    def save(self, *steps):
        save(self.saver, *steps)

    def save_held(self, gate, step, before=""):
        """Save, and return when the copy has come to an object whose path ends so."""
        gate.before = before
        gate.reached.clear()
        gate.open.clear()
        self.save(step)
        gate.reached.wait()

    def save_copied(self, *steps):
        """Save, and wait for the copy of each."""
        for step in steps:
            self.save(step)
            wait_for(lambda step=step: self.uploads.uploaded == step)

    def train(self, *steps):
        """Save after these steps and copy each; leave the store."""
        self.begin().save_copied(*steps)
        self.uploads.on_finish(after(steps[-1]))

    def at(self, folder, name, store=None):
        """The same run, or a copy of it, in another folder."""
        result = Run(folder, store or self.store, self.ranks, name)
        result.started = self.started
        return result

    def waited(self, step, limit_s=1000.0):
        """Wait for the copy of the last checkpoint; why there is none."""
        return self.uploads._wait(step, timedelta(seconds=limit_s))

    def remove_here(self, step):
        path = self.checkpoints.path(step)
        path.rename(self.folder / path.name)
