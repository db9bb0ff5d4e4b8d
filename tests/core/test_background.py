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


def test_a_thread_that_stays_starts_at_once_so_that_no_later_put_fails(no_thread):
    refused(RuntimeError, "can't start", BackgroundWorker, "lasting", print)
    no_thread.undo()
    handled = []
    worker = BackgroundWorker("lasting", handled.append)
    no_thread.setattr(threading.Thread, "start", None)
    assert worker.put(1) and worker.wait(HANG_S) and worker.put(2)
    assert worker.close(HANG_S) and handled == [1, 2]
