"""A copier whose lock another process has taken: it finishes, removes and begins nothing."""

import pytest

from pipeline.copies.claim import LOCK, Lock
from pipeline.errors import UserError
from pipeline.stores.store import Store
from pipeline.training.copies import copier as copier_module
from tests.training.copies.copying import Gate, save, save_copied, save_held, store_put_as_another, waiting_for_the_end
from tests.waiting import HANG_S, wait_for


@pytest.fixture
def held(tmp_path):
    """A store, and its lock, whose own thread sleeps."""
    lock = Lock(Store(f"file://{tmp_path}/store"), "a", lambda text: None, beat_s=1000.0)
    lock.take()
    yield lock.store, lock
    lock.release()


def test_a_process_thought_dead_neither_finishes_a_copy_nor_removes_any(made, held, monkeypatch):
    """Its lock's own thread stands still too: only by looking does it hear who copies there now."""
    store, lock = held
    saver, copier, copies, _ = made(store.url, lock)
    save_copied(saver, copier, 1)
    gate = Gate(monkeypatch)
    save_held(saver, gate, 2)
    store_put_as_another(store)
    gate.open.set()
    assert "took over" in copier.finish(2, 1000.0) and copies.found().whole == [1]
    assert ["took over" in text for text in copier.withdraw(0)] == [True] and copies.found().whole == [1]
    with pytest.raises(UserError, match="took over"):
        copier._prune()
    lock.release()
    assert store.head(LOCK) is not None


@pytest.mark.parametrize(("before", "kept"), [(".safetensors", ("COMPLETE.json", "records/events.jsonl")),
                                              ("COMPLETE.json", ("records/events.jsonl",))])
def test_a_process_thought_dead_puts_no_marker_or_records_over_its_successors(made, held, events, monkeypatch, before,
                                                                              kept):
    store, lock = held
    saver, copier, _, _ = made(store.url, lock)
    gate = Gate(monkeypatch)
    save_held(saver, gate, 2, before)
    store_put_as_another(store)
    gate.before = "nothing else"
    for name in kept:
        store.put(f"step-00000002/{name}", b"the successor's")
    gate.open.set()
    assert "took over" in copier.finish(2, 1000.0)
    assert {store.read(f"step-00000002/{name}") for name in kept} == {b"the successor's"}


def test_the_end_does_not_wait_where_the_lock_is_lost(made, held, monkeypatch):
    """Its own thread finds that out while a copy waits to be tried again."""
    monkeypatch.setattr(copier_module, "BEAT_S", 0.01)
    monkeypatch.setattr(copier_module, "AGAIN_S", (10.0 * HANG_S,))
    gate = Gate(monkeypatch)
    store, lock = held
    saver, copier, _, said = made(store.url, lock)
    gate.failing = True
    save(saver, 1)
    wait_for(lambda: any("could not be copied" in text for text in said))
    thread, told = waiting_for_the_end(copier, 1)
    wait_for(lambda: copier._ending)
    lock.lost = "Another took over"
    wait_for(lambda: not thread.is_alive())
    assert told == ["Another took over, and this run copies nothing there any more."]
