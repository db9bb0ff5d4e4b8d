"""The thread that copies, on one rank: what waits, what is tried again, and how it ends."""

from pipeline.training.copies import copier as copier_module
from tests.training.copies.copying import kept, save, save_held, waiting_for_the_end
from tests.waiting import wait_for


def test_of_what_comes_while_a_copy_is_made_the_newest_is_copied_and_the_rest_told(setting):
    saver, copier, copies, said, gate = setting
    save_held(saver, gate, 1)
    save(saver, 2, 3, 4)
    assert kept(saver) == [1, 4], "what is being copied and what waits stays, although one is to be kept"
    assert copier.needs(1) and copier.needs(4) and not copier.needs(3)
    gate.open.set()
    assert copier.finish(4, 1000.0) == ""
    ended = [(one.event, one.details["step"], one.details.get("left_out")) for one in copier.ended()]
    assert ended == [("checkpoint_copied", 1, [2, 3]), ("checkpoint_copied", 4, None)]
    assert copies.found().whole == [4] and not copier.needs(4)
    assert any("step-00000002, step-00000003 had no time to be" in text for text in said)


def test_what_failed_is_tried_again_while_training_goes_on_and_given_up_at_the_end(setting, monkeypatch):
    saver, copier, copies, said, gate = setting
    monkeypatch.setattr(copier_module, "AGAIN_S", (0.01,))
    gate.failing = True
    save(saver, 1)
    wait_for(lambda: sum("step-00000001 could not be copied to file://" in text for text in said) > 3)
    gate.failing = False
    wait_for(lambda: copies.found().whole == [1])
    gate.failing = True
    save(saver, 2)
    assert copier.finish(2, 1000.0) == "the store is away." == copier.ended()[0].details["error"]


def test_the_end_waits_no_longer_than_it_may_and_a_copier_that_is_stopped_makes_no_copy_any_more(setting):
    saver, copier, copies, _, gate = setting
    save_held(saver, gate, 1)
    assert copier.finish(1, 0.2) == "it was not done after 0.2 s."
    copier.stop()
    gate.open.set()
    copier._thread.join()
    assert copies.found().whole == [] and copier.copied == -1


def test_the_end_does_not_wait_for_a_thread_that_has_ended(setting, monkeypatch):
    saver, copier, _, said, gate = setting

    def broken(*_):
        raise OSError("broken")
    monkeypatch.setattr(copier, "_note", broken)
    save_held(saver, gate, 1)
    thread, told = waiting_for_the_end(copier, 1)
    wait_for(lambda: copier._ending)
    gate.open.set()
    wait_for(lambda: not thread.is_alive())
    assert told == ["OSError: broken."] and any("no further checkpoint is copied" in text for text in said)
