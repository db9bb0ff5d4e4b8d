"""The thread that copies, on one rank: what waits, what is tried again, and how it ends."""

from unittest.mock import Mock

import pytest

from drover.pipeline.core.errors import UserError
from drover.pipeline.storage.mirror import OWNER
from tests.refusal import refused
from tests.waiting import HANG_S, wait_for


def test_of_what_comes_while_a_copy_is_made_only_the_newest_is_copied(gated):
    run, gate = gated
    run.save_held(gate, 1)
    run.save(2, 3, 4)
    kept = sorted(path.name for path in run.checkpoints.folder.iterdir())
    assert kept == ["step-00000001", "step-00000004"], "what is copied and what waits stays, although one is to be kept"
    gate.open.set()
    assert run.waited(4) == ""
    assert [details["step"] for name, details in run.log if name == "checkpoint_copied"] == [1, 4]
    assert run.complete == [4] and not run.uploads.needs(4)


def test_what_failed_is_tried_again_while_training_goes_on_and_given_up_at_the_end(gated):
    run, gate = gated
    gate.failing = True
    run.save(1)
    wait_for(lambda: sum("step-00000001 could not be copied to file://" in text for text in run.printed) > 3)
    gate.failing = False
    wait_for(lambda: run.complete == [1])
    gate.failing = True
    run.save(2)
    assert run.waited(2) == "the store is away."


def test_the_end_waits_no_longer_than_it_may_and_a_copier_that_is_stopped_makes_no_copy_any_more(gated):
    run, gate = gated
    run.save_held(gate, 1)
    assert run.waited(1, 0.2) == "it was not complete after 0.2 s."
    gate.open.set()
    run.uploads._worker.wait()
    assert run.complete == [] and run.uploads.uploaded == -1


def test_the_end_does_not_wait_for_a_thread_that_has_ended(gated, monkeypatch):
    run, _ = gated
    monkeypatch.setattr(run.uploads, "_attempt", Mock(side_effect=OSError("broken")))
    run.save(1)
    assert run.waited(1, 10.0 * HANG_S) == "broken."
    run.save(2)
    assert any("step-00000002 is not copied" in text and "has ended (broken)" in text for text in run.printed)


@pytest.mark.parametrize(("before", "kept"), [(".safetensors", ("COMPLETE.json", "records/events.jsonl")),
                                              ("COMPLETE.json", ("records/events.jsonl",))])
def test_a_process_that_lost_the_store_puts_nothing_over_its_successors_and_removes_nothing(gated, before, kept):
    run, gate = gated
    (run.folder / "events.jsonl").write_text("{}\n")
    run.save_copied(1)
    run.save_held(gate, 2, before)
    # Another process claims it, past the gate, which holds back what goes through the store.
    (run.folder.with_name("store") / OWNER).write_text('{"format": 1, "name": "mini", "writer": "b"}')
    gate.before = "nothing else"
    for name in kept:
        run.store.put(f"step-00000002/{name}", b"the successor's")
    gate.open.set()
    assert "took it over" in run.waited(2) and run.complete == [1]
    assert {run.store.read(f"step-00000002/{name}") for name in kept} == {b"the successor's"}
    refused(UserError, "took it over", run.uploads._prune)
