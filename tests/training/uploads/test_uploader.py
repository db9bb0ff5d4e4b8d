"""The thread that copies, on one rank: what waits, what is tried again, and how it ends."""

import pytest

from drover.pipeline.core.errors import UserError
from drover.pipeline.training import uploads as module
from tests.training.uploads.saving import (
    kept,
    save,
    save_copied,
    save_held,
    store_put_as_another,
    waited,
)
from tests.waiting import HANG_S, wait_for


def test_of_what_comes_while_a_copy_is_made_the_newest_is_copied_and_the_rest_told(setting):
    saver, copier, copies, said, gate = setting
    save_held(saver, gate, 1)
    save(saver, 2, 3, 4)
    assert kept(saver) == [1, 4], "what is being copied and what waits stays, although one is to be kept"
    assert copier.needs(1) and copier.needs(4) and not copier.needs(3)
    gate.open.set()
    assert waited(copier, 4) == ""
    assert [(details["step"], details.get("left_out")) for name, details in copier.event
            if name == "checkpoint_copied"] == [(1, None), (4, [2, 3])]
    assert copies.found().whole == [4] and not copier.needs(4)
    assert any("skipped: step-00000002, step-00000003" in text for text in said)


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
    assert waited(copier, 2) == "the store is away."
    assert copier.event.names().count("checkpoint_copy_failed") > 4


def test_the_end_waits_no_longer_than_it_may_and_a_copier_that_is_stopped_makes_no_copy_any_more(setting):
    saver, copier, copies, _, gate = setting
    save_held(saver, gate, 1)
    assert waited(copier, 1, 0.2) == "it was not complete after 0.2 s."
    copier.close()
    gate.open.set()
    copier._worker.wait()
    assert copies.found().whole == [] and copier.uploaded == -1


def test_the_end_does_not_wait_for_a_thread_that_has_ended(setting, monkeypatch):
    saver, copier, _, said, _ = setting

    def broken(*_):
        raise OSError("broken")
    monkeypatch.setattr(copier, "_attempt", broken)
    save(saver, 1)
    assert waited(copier, 1, 10.0 * HANG_S) == "broken."
    save(saver, 2)
    assert any("step-00000002 is not copied" in text and "has ended (broken)" in text for text in said)


def test_a_process_that_lost_the_store_neither_finishes_a_copy_nor_removes_any(setting):
    saver, copier, copies, _, gate = setting
    save_copied(saver, copier, 1)
    save_held(saver, gate, 2)
    store_put_as_another(copies.store)
    gate.open.set()
    assert "took it over" in waited(copier, 2) and copies.found().whole == [1]
    with pytest.raises(UserError, match="took it over"):
        copier._prune()


@pytest.mark.parametrize(("before", "kept"), [(".safetensors", ("COMPLETE.json", "records/events.jsonl")),
                                              ("COMPLETE.json", ("records/events.jsonl",))])
def test_a_process_that_lost_the_store_puts_no_marker_or_records_over_its_successors(setting, events, before, kept):
    saver, copier, copies, _, gate = setting
    store = copies.store
    save_held(saver, gate, 2, before)
    store_put_as_another(store)
    gate.before = "nothing else"
    for name in kept:
        store.put(f"step-00000002/{name}", b"the successor's")
    gate.open.set()
    assert "took it over" in waited(copier, 2)
    assert {store.read(f"step-00000002/{name}") for name in kept} == {b"the successor's"}
