"""Uploads of checkpoints on one rank: whose store it is, what is continued from, what is tried again, how it ends."""

import json
import shutil

import pytest

from drover.pipeline.core.errors import UserError
from drover.pipeline.core.files import renamed
from drover.pipeline.records.checkpoints import MARKER, checkpoint_name
from drover.pipeline.records.metrics import Rollback, add_rollback, read_rollbacks
from drover.pipeline.storage.mirror import COPY, OWNER
from drover.pipeline.storage.store import Store
from drover.pipeline.training import uploads as module
from drover.pipeline.training.uploads import SET_ASIDE, take_records, train_records
from tests.refusal import refused
from tests.training.saving import Gate, Run
from tests.waiting import wait_for


@pytest.fixture
def run(tmp_path, ranks):
    made = Run(tmp_path / "train", Store(f"file://{tmp_path}/store"), ranks)
    yield made
    for uploads in made.started:
        uploads.close()


@pytest.fixture
def gated(tmp_path, ranks, monkeypatch):
    """(a run that has begun, keeps one checkpoint and is soon tried again, a gate before its store)"""
    gate = Gate(monkeypatch)
    monkeypatch.setattr(module, "RETRY_S", (0.01,))
    made = Run(tmp_path / "train", Store(f"file://{tmp_path}/store"), ranks, keep=1).begin()
    yield made, gate
    gate.failing = False
    gate.before = "nothing else"
    gate.open.set()
    made.uploads.close()


def test_folders_that_nobody_has_claimed_are_left_alone(run):
    last = COPY
    run.store.put(f"step-7/{last}", b"somebody else's")
    refused(UserError, r"folders named after steps, but no owner\.json", run.start)
    assert [entry.path for entry in run.store.list()] == [f"step-7/{last}"]
    run.store.delete([f"step-7/{last}"])
    run.train(4)
    run.store.put("step-00000008/half", b"ours")
    run.start()
    assert run.complete == [4] and not run.copies.list().unfinished
    assert "removed incomplete copies of an earlier start" in run.printed[-1]


@pytest.mark.parametrize("name", [MARKER, COPY])
def test_a_damaged_copy_gives_way_to_the_one_before_unless_there_is_as_new_a_checkpoint_here(run, name):
    run.train(4, 8)
    run.store.put(f"{checkpoint_name(8)}/{name}", b"{")
    assert run.gone_on_from() == 8
    run.remove_here(8)
    assert run.gone_on_from() == run.uploads.uploaded == 4
    assert run.complete == [4]
    run.store.put(f"{checkpoint_name(4)}/{name}", b"{")
    run.remove_here(4)
    copying = run.start()
    refused(UserError, r"Every copy of a checkpoint in .* is damaged", copying.newest_valid)


def test_a_copy_of_a_repeated_step_is_kept_although_the_step_was_once_set_aside(run):
    run.train(4, 8)
    run.remove_here(8)
    aside = run.checkpoints.folder / f"{SET_ASIDE}{checkpoint_name(8)}"
    aside.mkdir()
    (aside / MARKER).write_text("of the damaged checkpoint")
    assert run.gone_on_from() == 8 and run.complete == [4, 8]


def test_copies_of_checkpoints_that_were_set_aside_are_removed_by_the_next_start(run):
    run.train(4, 8, 12)
    for step in (8, 12):
        renamed(path := run.checkpoints.path(step), f"{SET_ASIDE}{path.name}")
    assert run.gone_on_from() == 4 and run.complete == [4]


def test_a_copy_of_a_run_s_folder_takes_its_store_only_under_its_name(run, tmp_path):
    run.train(4)
    living = run.start()
    copied = tmp_path / "copied"
    shutil.copytree(run.folder, copied)
    before = {entry.path: run.store.read(entry.path) for entry in run.store.list()}
    refused(UserError, r"of the run mini, not of trial\. If .*/copied is that run", run.at(copied, "trial").start)
    run.at(copied, "trial", Store(f"file://{tmp_path}/other")).train(8)
    refused(UserError, "of the run mini, not of trial", run.at(copied, "trial").start)
    assert {path: run.store.read(path) for path in before} == before
    living._owner.refuse_lost()
    shutil.copytree(run.folder, tmp_path / "second")
    run.at(tmp_path / "second", "mini").start()
    refused(UserError, "took it over", living._owner.refuse_lost)


def test_a_killed_run_goes_on_at_once_where_it_is_and_where_it_was_moved(run, tmp_path):
    run.train(4)
    run.start()
    run.start()
    shutil.copytree(run.folder, tmp_path / "moved")  # to another disk
    moved = run.at(tmp_path / "moved", "mini")
    assert moved.start().newest_valid()[1].step == 4
    assert not [text for text in run.printed + moved.printed if "takes over" in text]
    moved.train(8)
    assert moved.complete == [4, 8]


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


def test_a_process_that_lost_the_store_puts_nothing_over_its_successors_and_removes_nothing(gated):
    kept = ("COMPLETE.json", "records/events.jsonl")
    run, gate = gated
    (run.folder / "events.jsonl").write_text("{}\n")
    run.save_copied(1)
    run.save_held(gate, 2, ".safetensors")
    # Another process claims it, past the gate, which holds back what goes through the store.
    (run.folder.with_name("store") / OWNER).write_text('{"format": 1, "name": "mini", "writer": "b"}')
    gate.before = "nothing else"
    for name in kept:
        run.store.put(f"step-00000002/{name}", b"the successor's")
    gate.open.set()
    assert "took it over" in run.waited(2) and run.complete == [1]
    assert {run.store.read(f"step-00000002/{name}") for name in kept} == {b"the successor's"}
    refused(UserError, "took it over", run.uploads._prune)


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
