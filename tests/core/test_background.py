"""A thread that handles items."""

import threading

import pytest

from drover.pipeline.core.background import BackgroundWorker
from tests.refusal import refused
from tests.waiting import HANG_S


@pytest.fixture
def no_thread(monkeypatch):
    """Threads cannot be started, until it is undone."""
    def refuse(thread):
        raise RuntimeError("can't start new thread")
    monkeypatch.setattr(threading.Thread, "start", refuse)
    return monkeypatch


def test_a_thread_that_cannot_start_leaves_no_item_behind(no_thread):
    handled = []
    worker = BackgroundWorker("brief", handled.append, stays=False)
    refused(RuntimeError, "can't start", worker.put, 1)
    assert worker.pending() == [] and worker.wait(0.0)
    no_thread.undo()
    assert worker.put(2) and worker.wait(HANG_S) and worker.put(3)
    assert worker.close(HANG_S) and handled == [2, 3]
