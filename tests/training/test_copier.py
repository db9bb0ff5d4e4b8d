"""The thread that copies, on one rank: what waits, what is left out, what is protected and what is taken back."""

import json
import socket
import threading
from pathlib import Path

import pytest
import torch

from pipeline.config.training import CheckpointConfig
from pipeline.copies.checkpoints import CopiedCheckpoints
from pipeline.copies.claim import LOCK, Lock
from pipeline.errors import UserError
from pipeline.formats.sharded_tensors import whole
from pipeline.parallel.ranks import start_ranks, stop_ranks
from pipeline.records.checkpoints import CHECKPOINTS, TrainingProgress
from pipeline.records.rollbacks import ROLLBACKS, Rollback, add_rollback, read_rollbacks
from pipeline.stores.store import Store
from pipeline.training.async_saver import AsyncSaver
from pipeline.training.checkpoint import Checkpoints
from pipeline.training.copies import copier as copier_module
from pipeline.training.copies.beside import take_up, whole_records
from pipeline.training.copies.copier import Copier
from tests.waiting import HANG_S, wait_for


class Gate:
    """Holds back what is put into a store; `failing` makes it fail."""

    def __init__(self, monkeypatch):
        self.open, self.failing, self.reached, self.before = threading.Event(), False, threading.Event(), ""
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


@pytest.fixture()
def made(tmp_path, monkeypatch):
    """From a store's address to (saver, copier, copies, said), the saver telling the copier, on a group of one."""
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    yield lambda url, lock=None: parts_of(tmp_path, url, lock)
    stop_ranks()


def parts_of(tmp_path, url, lock=None):
    ranks, said = start_ranks(), []
    config = CheckpointConfig(keep=1, attempts=2)
    copies = CopiedCheckpoints(Store(url))
    checkpoints = Checkpoints(tmp_path / "train" / CHECKPOINTS, ranks, said.append, lambda step: copier.needs(step))
    copier = Copier(copies, lock, ranks, config, tmp_path / "train", checkpoints.path, said.append, -1)
    saver = AsyncSaver(checkpoints, ranks, config, {}, said.append, copier.submit)
    return saver, copier, copies, said


@pytest.fixture()
def setting(made, tmp_path, monkeypatch):
    """The same for a folder as the store, and a gate before it."""
    return *made(f"file://{tmp_path}/store"), Gate(monkeypatch)


def save(saver, *steps):
    for step in steps:
        saver.save({"model.a": [whole(torch.full((3, 5), float(step)))]}, TrainingProgress(step=step))
        saver.wait()


def kept(saver):
    return sorted(int(path.name[5:]) for path in saver.checkpoints.folder.iterdir())


def test_what_goes_on_with_a_checkpoint_ends_before_its_step_however_late_it_is_copied(tmp_path):
    lines = [json.dumps({"step": step}).encode() + b"\n" for step in (3, 4, 5, 4, 5, 6)]
    (tmp_path / "metrics.jsonl").write_bytes(b"".join(lines) + b'{"st')
    (tmp_path / "samples.jsonl").write_bytes(lines[2])
    (tmp_path / "events.jsonl").write_bytes(lines[5] + b"{")
    (tmp_path / "rollbacks.json").write_bytes(b"{}")
    found = {record["path"]: data for record, data in whole_records(tmp_path, 5)}
    assert found == {"metrics.jsonl": b"".join(lines[:4]), "samples.jsonl": b"", "events.jsonl": lines[5],
                     "rollbacks.json": b"{}"}
    take_up_of(found, tmp_path / "fetched", tmp_path / "train")
    assert {path.name: path.read_bytes() for path in (tmp_path / "train").iterdir()} == found


def take_up_of(found, fetched, train):
    for folder in (fetched, train):
        folder.mkdir()
    for name, data in found.items():
        (fetched / name).write_bytes(data)
    take_up(fetched, train, lambda text: pytest.fail(text))


def test_rollbacks_that_came_after_a_copy_stay_when_it_is_fetched(tmp_path):
    rollbacks = [Rollback(step=step, back_to=0, samples=((step, step + 8),), plan_sha256="a", why="a spike")
                 for step in (8, 16, 24)]
    fetched, train, said = tmp_path / "fetched", tmp_path / "train", []
    for folder, own in ((fetched, rollbacks[:1]), (train, rollbacks[:2])):
        folder.mkdir()
        for rollback in own:
            add_rollback(folder, rollback)
    take_up(fetched, train, said.append)
    assert read_rollbacks(train) == rollbacks[:2]
    add_rollback(fetched, rollbacks[1])
    add_rollback(fetched, rollbacks[2])
    take_up(fetched, train, said.append)
    assert read_rollbacks(train) == rollbacks and not said
    (train / ROLLBACKS).unlink()
    add_rollback(train, rollbacks[2])
    take_up(fetched, train, said.append)
    assert read_rollbacks(train) == rollbacks and "set aside as rollbacks.json.replaced-1" in said[0]


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


def test_copies_of_damaged_training_are_taken_back_and_none_is_made_any_more(setting):
    saver, copier, copies, said, gate = setting
    save(saver, 1)
    wait_for(lambda: copier.copied == 1)
    save(saver, 2)
    wait_for(lambda: copier.copied == 2)
    gate.reached.clear()
    gate.open.clear()
    save(saver, 3)
    gate.reached.wait()
    told = copier.withdraw(1)
    assert len(told) == 1 and "step-00000002" in told[0]
    gate.open.set()
    assert copier.finish(3, 1000.0)
    assert not any("tried again" in text for text in said)
    assert copies.found().whole == []


def test_a_process_thought_dead_neither_finishes_a_copy_nor_removes_any(made, tmp_path, monkeypatch):
    """Its lock's own thread stands still too: only by looking does it hear who copies there now."""
    store = Store(f"file://{tmp_path}/store")
    lock = Lock(store, "a", lambda text: None, beat_s=1000.0)
    lock.take()
    saver, copier, copies, _ = made(store.url, lock)
    save(saver, 1)
    wait_for(lambda: copier.copied == 1)
    gate = Gate(monkeypatch)
    gate.open.clear()
    save(saver, 2)
    gate.reached.wait()
    store_put_as_another(store)
    gate.open.set()
    assert "took over" in copier.finish(2, 1000.0) and copies.found().whole == [1]
    assert ["took over" in text for text in copier.withdraw(0)] == [True] and copies.found().whole == [1]
    with pytest.raises(UserError, match="took over"):
        copier._prune()
    lock.release()
    assert store.head(LOCK) is not None


def store_put_as_another(store):
    """Beside the gate, which holds back what goes through the store."""
    (Path(store.url.removeprefix("file://")) / LOCK).write_text('{"token": "b"}')


def test_a_copier_that_is_stopped_makes_no_copy_any_more(setting):
    saver, copier, copies, _, gate = setting
    gate.open.clear()
    save(saver, 1)
    gate.reached.wait()
    copier.stop()
    gate.open.set()
    copier._thread.join()
    assert copies.found().whole == [] and copier.copied == -1


@pytest.fixture()
def events(tmp_path):
    """The train folder's log, which goes on with a checkpoint; a function that has it grow."""
    (tmp_path / "train").mkdir()

    def grow(text):
        with (tmp_path / "train" / "events.jsonl").open("a") as file:
            file.write(f'"{text}"\n')
    grow("begun")
    return grow


def test_a_copy_whose_last_answer_was_lost_counts_no_more_while_it_is_made_again(setting, events, monkeypatch):
    """A kill meanwhile leaves no copy, rather than one whose hashes are of other records."""
    saver, copier, copies, _, gate = setting
    monkeypatch.setattr(copier_module, "AGAIN_S", (0.01,))
    finish = copies.finish

    def answer_lost(*what):
        finish(*what)
        monkeypatch.setattr(copies, "finish", finish)
        events("more")
        gate.reached.clear()
        gate.open.clear()
        gate.before = "events.jsonl"
        raise UserError("no answer.")
    monkeypatch.setattr(copies, "finish", answer_lost)
    save(saver, 1)
    wait_for(lambda: gate.before and gate.reached.is_set())
    assert copies.found().whole == []
    gate.open.set()
    assert copier.finish(1, 1000.0) == "" and copies.found().whole == [1]
    assert copies.store.read("step-00000001/records/events.jsonl") == b'"begun"\n"more"\n'


def test_a_step_that_is_saved_again_is_no_copy_until_it_is_copied_again(setting):
    saver, copier, copies, _, gate = setting
    save(saver, 1)
    wait_for(lambda: copier.copied == 1)
    gate.reached.clear()
    gate.open.clear()
    save(saver, 1)
    gate.reached.wait()
    assert copies.found().whole == [] and copier.copied == -1
    gate.open.set()
    assert copier.finish(1, 1000.0) == "" and copies.found().whole == [1]


def test_nothing_is_put_over_a_copy_that_cannot_be_made_to_count_no_more(setting, monkeypatch):
    saver, copier, copies, _, gate = setting
    monkeypatch.setattr(copier_module, "AGAIN_S", (0.01,))
    save(saver, 1)
    wait_for(lambda: copier.copied == 1)

    def away(store, paths):
        raise UserError("the store is away.")
    gate.reached.clear()
    with monkeypatch.context() as patch:
        patch.setattr(Store, "delete", away)
        save(saver, 1)
        assert copier.finish(1, 1000.0) == "the store is away."
    assert not gate.reached.is_set() and copies.found().whole == [1]


@pytest.mark.parametrize(("before", "kept"), [(".safetensors", ("COMPLETE.json", "records/events.jsonl")),
                                              ("COMPLETE.json", ("records/events.jsonl",))])
def test_a_process_thought_dead_puts_no_marker_or_records_over_its_successors(made, tmp_path, events, monkeypatch,
                                                                           before, kept):
    store = Store(f"file://{tmp_path}/store")
    lock = Lock(store, "a", lambda text: None, beat_s=1000.0)
    lock.take()
    saver, copier, _, _ = made(store.url, lock)
    gate = Gate(monkeypatch)
    gate.before = before
    gate.open.clear()
    save(saver, 2)
    gate.reached.wait()
    store_put_as_another(store)
    gate.before = "nothing else"
    for name in kept:
        store.put(f"step-00000002/{name}", b"the successor's")
    gate.open.set()
    assert "took over" in copier.finish(2, 1000.0)
    assert {store.read(f"step-00000002/{name}") for name in kept} == {b"the successor's"}
    lock.release()


def test_a_process_thought_dead_begins_no_copy(made, tmp_path):
    store = Store(f"file://{tmp_path}/store")
    lock = Lock(store, "a", lambda text: None, beat_s=1000.0)
    lock.take()
    saver, copier, copies, _ = made(store.url, lock)
    store_put_as_another(store)
    copies.finish(1, [])  # by the successor
    save(saver, 1)
    assert "took over" in copier.finish(1, 1000.0)
    assert [entry.path for entry in store.list("step-00000001")] == ["step-00000001/copy.json"]
    lock.release()


def test_a_marker_that_cannot_be_read_costs_no_save_and_is_tried_again(setting, monkeypatch):
    saver, copier, copies, _, _ = setting
    monkeypatch.setattr(copier_module, "AGAIN_S", (0.01,))
    read = copier_module.read_marker

    def broken(path):
        monkeypatch.setattr(copier_module, "read_marker", read)
        raise UserError("Input/output error")
    monkeypatch.setattr(copier_module, "read_marker", broken)
    save(saver, 1)
    assert [one.event for one in saver.ended()] == ["checkpoint"]
    wait_for(lambda: copier.copied == 1)
    assert [one.event for one in copier.ended()] == ["checkpoint_copy_failed", "checkpoint_copied"]
    assert copies.found().whole == [1]


def waiting_for_the_end(copier, step):
    """A thread that waits for the copy of the last checkpoint, longer than any test, and what it was told."""
    told = []
    thread = threading.Thread(target=lambda: told.append(copier.finish(step, 10.0 * HANG_S)), daemon=True)
    thread.start()
    return thread, told


def test_the_end_does_not_wait_where_the_lock_is_lost(made, tmp_path, monkeypatch):
    """Its own thread finds that out while a copy waits to be tried again."""
    monkeypatch.setattr(copier_module, "BEAT_S", 0.01)
    monkeypatch.setattr(copier_module, "AGAIN_S", (10.0 * HANG_S,))
    gate = Gate(monkeypatch)
    lock = Lock(Store(f"file://{tmp_path}/store"), "a", lambda text: None, beat_s=1000.0)
    lock.take()
    saver, copier, _, said = made(lock.store.url, lock)
    gate.failing = True
    save(saver, 1)
    wait_for(lambda: any("could not be copied" in text for text in said))
    thread, told = waiting_for_the_end(copier, 1)
    wait_for(lambda: copier._ending)
    lock.lost = "Another took over"
    wait_for(lambda: not thread.is_alive())
    assert told == ["Another took over, and this run copies nothing there any more."]
    lock.release()


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
