"""What counts as a copy, and the records that go with it."""

import json
from unittest.mock import DEFAULT, Mock

import pytest

from drover.pipeline.core.errors import UserError
from drover.pipeline.records.metrics import Rollback, add_rollback, read_rollbacks
from drover.pipeline.training import uploads as module
from drover.pipeline.training.uploads import take_records, train_records


def test_what_goes_on_with_a_checkpoint_ends_before_its_step_however_late_it_is_copied(tmp_path):
    lines = [json.dumps({"step": step}).encode() + b"\n" for step in (3, 4, 5, 4, 5, 6)]
    local = {"metrics.jsonl": b"".join(lines) + b'{"st', "samples.jsonl": lines[2], "events.jsonl": lines[5] + b"{",
            "rollbacks.json": b"{}"}
    expected = {"metrics.jsonl": b"".join(lines[:4]), "samples.jsonl": b"", "events.jsonl": lines[5],
                "rollbacks.json": b"{}"}
    fetched = tmp_path / "fetched"
    train = tmp_path / "train"
    for folder, contents in ((tmp_path, local), (fetched, expected), (train, {})):
        folder.mkdir(exist_ok=True)
        for name, content in contents.items():
            (folder / name).write_bytes(content)
    assert train_records(tmp_path, 5) == expected
    take_records(fetched, train, pytest.fail)
    assert {path.name: path.read_bytes() for path in train.iterdir()} == expected


@pytest.mark.parametrize(("local", "copied", "left", "renamed"), [
    ((8, 16), (8,), (8, 16), 0), ((8, 16), (8, 16, 24), (8, 16, 24), 0), ((24,), (8, 16, 24), (8, 16, 24), 1)])
def test_rollbacks_that_came_after_a_copy_stay_when_it_is_fetched(tmp_path, local, copied, left, renamed):
    printed = []
    for name, steps in (("train", local), ("fetched", copied)):
        (tmp_path / name).mkdir()
        for step in steps:
            add_rollback(tmp_path / name, Rollback(step, 0, ((step, step + 8),), "a", "a spike"))
    take_records(tmp_path / "fetched", tmp_path / "train", printed.append)
    assert tuple(rollback.step for rollback in read_rollbacks(tmp_path / "train")) == left
    assert ["renamed to rollbacks.json.replaced" in text for text in printed] == [True] * renamed


def test_a_step_that_is_saved_again_is_no_copy_until_it_is_copied_again(gated):
    run, gate = gated
    run.save_copied(1)
    run.save_held(gate, 1)
    assert run.complete == [] and run.uploads.uploaded == -1
    gate.open.set()
    assert run.waited(1) == "" and run.complete == [1]


def test_a_marker_that_cannot_be_read_costs_no_save_and_is_tried_again(gated, monkeypatch):
    run, _ = gated
    read = Mock(wraps=module.read_marker, side_effect=[UserError("Input/output error"), *[DEFAULT] * 9])
    monkeypatch.setattr(module, "read_marker", read)
    run.save_copied(1)
    assert sorted(run.log.names()) == ["checkpoint", "checkpoint_copied", "checkpoint_copy_failed"]
    assert run.complete == [1]
