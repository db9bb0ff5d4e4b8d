"""The thread that copies, on one rank: what waits, what is tried again, and how it ends."""

import pytest

from pipeline.copies.claim import LOCK, Lock
from pipeline.errors import UserError
from pipeline.stores.store import Store
from pipeline.training import uploads as module
from tests.training.uploads.saving import (
    Gate,
    kept,
    save,
    save_copied,
    save_held,
    store_put_as_another,
)
from tests.waiting import HANG_S, wait_for


def test_of_what_comes_while_a_copy_is_made_the_newest_is_copied_and_the_rest_told(setting):
    saver, copier, copies, said, gate = setting
    save_held(saver, gate, 1)
    save(saver, 2, 3, 4)
    assert kept(saver) == [1, 4], "what is being copied and what waits stays, although one is to be kept"
    assert copier.needs(1) and copier.needs(4) and not copier.needs(3)
    gate.open.set()
    assert copier.finish(4, 1000.0) == ""
    assert [(details["step"], details.get("left_out")) for name, details in copier.event
            if name == "checkpoint_copied"] == [(1, [2, 3]), (4, None)]
    assert copies.found().whole == [4] and not copier.needs(4)
    assert any("step-00000002, step-00000003 had no time to be" in text for text in said)


def test_what_failed_is_tried_again_while_training_goes_on_and_given_up_at_the_end(setting, monkeypatch):
    saver, copier, copies, said, gate = setting
    monkeypatch.setattr(module, "RETRY_S", (0.01,))
    gate.failing = True
    save(saver, 1)
    wait_for(lambda: sum("step-00000001 could not be copied to file://" in text for text in said) > 3)
    gate.failing = False
    wait_for(lambda: copies.found().whole == [1])
    gate.failing = True
    save(saver, 2)
    assert copier.finish(2, 1000.0) == "the store is away."
    assert copier.event.names().count("checkpoint_copy_failed") > 4


def test_the_end_waits_no_longer_than_it_may_and_a_copier_that_is_stopped_makes_no_copy_any_more(setting):
    saver, copier, copies, _, gate = setting
    save_held(saver, gate, 1)
    assert copier.finish(1, 0.2) == "it was not done after 0.2 s."
    copier.stop()
    gate.open.set()
    copier._worker.wait()
    assert copies.found().whole == [] and copier.uploaded == -1


def test_the_end_does_not_wait_for_a_thread_that_has_ended(setting, monkeypatch):
    saver, copier, _, said, _ = setting

    def broken(*_):
        raise OSError("broken")
    monkeypatch.setattr(copier, "_attempt", broken)
    save(saver, 1)
    assert copier.finish(1, 10.0 * HANG_S) == "broken."
    save(saver, 2)
    assert any("step-00000002 is not copied" in text and "has ended (broken)" in text for text in said)


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
    monkeypatch.setattr(module, "RETRY_S", (10.0 * HANG_S,))
    gate = Gate(monkeypatch)
    store, lock = held
    saver, copier, _, said = made(store.url, lock)
    gate.failing = True
    save(saver, 1)
    wait_for(lambda: any("could not be copied" in text for text in said))
    lock.lost = "Another took over"
    assert copier.finish(1, 10.0 * HANG_S) == "Another took over, and this run copies nothing there any more."
