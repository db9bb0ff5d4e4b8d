"""The thread that copies, on one rank: what waits, what is tried again, and how it ends."""

import socket

from pipeline.training.copies import copier as copier_module
from tests.training.copies.copying import kept, save, waiting_for_the_end
from tests.waiting import wait_for


def test_of_what_comes_while_a_copy_is_made_the_newest_is_copied_and_the_rest_told(setting):
    saver, copier, copies, said, gate = setting
    gate.open.clear()
    save(saver, 1)
    gate.reached.wait()
    save(saver, 2, 3, 4)
    assert kept(saver) == [1, 4], "what is being copied and what waits stays, although one is to be kept"
    assert copier.needs(1) and copier.needs(4) and not copier.needs(3)
    gate.open.set()
    assert copier.finish(4, 1000.0) == ""
    ended = [(one.event, one.details["step"], one.details.get("left_out")) for one in copier.ended()]
    assert ended == [("checkpoint_copied", 1, [2, 3]), ("checkpoint_copied", 4, None)]
    assert copies.found().whole == [4] and not copier.needs(4)
    assert any("step-00000002, step-00000003 had no time to be" in text for text in said)


def test_a_store_that_is_slow_to_the_very_last_keeps_neither_the_loop_nor_saves_waiting(setting):
    saver, copier, copies, _, gate = setting
    gate.before = "copy.json"
    gate.open.clear()
    save(saver, 1)
    gate.reached.wait()
    save(saver, 2)
    assert [one.event for one in copier.ended()] == [] and kept(saver) == [1, 2] and copier.needs(1)
    gate.open.set()
    assert copier.finish(2, 1000.0) == "" and copies.found().whole == [2]


def test_what_failed_is_tried_again_while_training_goes_on(setting, monkeypatch):
    saver, copier, copies, said, gate = setting
    monkeypatch.setattr(copier_module, "AGAIN_S", (0.01,))
    gate.failing = True
    save(saver, 1)
    wait_for(lambda: sum("could not be copied" in text for text in said) > 3)
    gate.failing = False
    wait_for(lambda: copies.found().whole == [1])
    assert "step-00000001 could not be copied to file://" in next(text for text in said if "copied" in text)
    assert copier.finish(1, 1000.0) == "" and copier.ended()[0].details["error"] == "the store is away."


def test_the_end_gives_up_after_so_many_attempts_and_says_why(setting, monkeypatch):
    saver, copier, _, _, gate = setting
    monkeypatch.setattr(copier_module, "AGAIN_S", (0.01,))
    gate.failing = True
    save(saver, 1)
    assert copier.finish(1, 1000.0) == "the store is away."


def test_a_server_that_is_gone_is_named_and_costs_nothing_but_the_copy(made, moto_server, monkeypatch):
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # and does not listen
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{nobody.getsockname()[1]}")
        monkeypatch.setattr(copier_module, "AGAIN_S", (0.01,))
        saver, copier, _, said = made("s3://bucket-of-nobody/run")
        save(saver, 1, 2)
        problem = copier.finish(2, 1000.0)
    saver.prune()
    assert "s3://bucket-of-nobody/run" in problem and kept(saver) == [2]
    assert any("Training goes on" in text for text in said)


def test_a_store_that_does_not_answer_holds_the_end_up_no_longer_than_it_may(setting):
    saver, copier, _, _, gate = setting
    gate.open.clear()
    save(saver, 1)
    assert copier.finish(1, 0.2) == "it was not done after 0.2 s."
    gate.open.set()


def test_a_copier_that_is_stopped_makes_no_copy_any_more(setting):
    saver, copier, copies, _, gate = setting
    gate.open.clear()
    save(saver, 1)
    gate.reached.wait()
    copier.stop()
    gate.open.set()
    copier._thread.join()
    assert copies.found().whole == [] and copier.copied == -1


def test_the_end_does_not_wait_for_a_thread_that_has_ended(setting, monkeypatch):
    saver, copier, _, said, gate = setting

    def broken(*_):
        raise OSError("broken")
    monkeypatch.setattr(copier, "_note", broken)
    gate.open.clear()
    save(saver, 1)
    gate.reached.wait()
    thread, told = waiting_for_the_end(copier, 1)
    wait_for(lambda: copier._ending)
    gate.open.set()
    wait_for(lambda: not thread.is_alive())
    assert told == ["OSError: broken."] and any("no further checkpoint is copied" in text for text in said)
