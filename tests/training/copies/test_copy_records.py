"""What counts as a copy, and the records that go with it."""

import json

from pipeline.errors import UserError
from pipeline.records.rollbacks import ROLLBACKS, Rollback, add_rollback, read_rollbacks
from pipeline.stores.store import Store
from pipeline.training.copies import copier as copier_module
from pipeline.training.copies.beside import take_up, whole_records
from tests.training.copies.copying import save, take_up_of
from tests.waiting import wait_for


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
