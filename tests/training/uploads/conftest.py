"""Runs and their uploads on a group of one."""

import pytest

from drover.pipeline.storage.store import Store
from drover.pipeline.training import uploads as module
from tests.training.uploads.saving import Gate, Run


@pytest.fixture
def run(tmp_path, ranks):
    made = Run(tmp_path / "train", Store(f"file://{tmp_path}/store"), ranks)
    yield made
    for uploads in made.started:
        uploads.close()


@pytest.fixture
def gated(tmp_path, ranks, monkeypatch):
    """(a run that has begun, keeps one checkpoint and is soon tried again, a gate before its store)"""
    gate = Gate(monkeypatch)
    monkeypatch.setattr(module, "RETRY_S", (0.01,))
    made = Run(tmp_path / "train", Store(f"file://{tmp_path}/store"), ranks, keep=1).begin()
    yield made, gate
    gate.failing = False
    gate.before = "nothing else"
    gate.open.set()
    made.uploads.close()
