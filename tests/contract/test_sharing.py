"""Processes that share a stage, as elements of an array do: each task once, whatever ends meanwhile."""

import itertools
import os
import signal
from collections import Counter

import pytest

from drover.pipeline.contract import locks
from drover.pipeline.contract.entry import stage_main
from drover.pipeline.contract.locks import Claims
from drover.pipeline.contract.manifest import read_manifest
from drover.pipeline.shard import shard
from tests.contract.conftest import ended
from tests.waiting import wait_for


def test_elements_forced_together_start_from_scratch_once_and_do_each_unit_once(twelve):
    twelve.run()
    (twelve.folder / "old.txt").touch()
    twelve.log.unlink()
    forced = ("launch.processes=1", "--force-id", "chain-7")
    first, second = (twelve.start("--element", name, *forced, held=4) for name in "ab")
    wait_for(lambda: len(twelve.tasks()) == 6, of=first)
    assert not (twelve.folder / "old.txt").exists()
    for arguments in ([], ["--force"], ["--element", "c", "--force-id", "chain-8"]):
        assert "is in use by" in twelve.run(*arguments, status=2)
    assert "would do other work: changed" in twelve.run("--element", "c", "shard.validation_share=0.5", status=2)
    (twelve.folder / "9.txt.other-node-1.tmp").touch()  # what another element may be writing
    late = twelve.start("--element", "c", *forced, held=4)
    wait_for(lambda: len(twelve.tasks()) == 7, of=late)
    assert (twelve.folder / "9.txt.other-node-1.tmp").exists()
    twelve.gate.touch()
    printed = [ended(process) for process in (first, second, late)]
    assert sum("done in" in text for text in printed) == 1
    assert sum("another process has finished it" in text for text in printed) == 2
    assert read_manifest(twelve.folder).start["force_id"] == "chain-7"
    for arguments in (forced, ("--element", "a", *forced), ()):
        assert "up to date" in twelve.run(*arguments)
    assert twelve.tasks() == Counter(range(12)) and not list(twelve.folder.rglob("*.tmp"))


def test_a_killed_element_s_units_are_done_by_the_others(twelve):
    killed, other = (twelve.start("--element", name, "launch.processes=2", held=4) for name in "ab")
    wait_for(lambda: len(twelve.tasks()) == 8, of=other)
    before = twelve.records()
    killed.kill()
    assert killed.wait() == -signal.SIGKILL
    again = twelve.start("--element", "a", "launch.processes=2")  # as its job does after a crash
    twelve.gate.touch()
    ended(other)
    ended(again)
    started = twelve.tasks()
    assert set(started) == {*range(12)} and started.total() == 14, "what was being done is done again, and no more"
    assert before.items() <= twelve.records().items() and len(read_manifest(twelve.folder).outputs) == 12
    assert {path.name for path in twelve.folder.iterdir()} == {
        "manifest.json", "units", *(f"{number}.txt" for number in range(12))}


@pytest.mark.slow
def test_an_element_that_only_waits_has_time_enough(twelve):
    """Two starts in a row that finish no task are the last, but not if the tasks that are left are those of others."""
    at_work = twelve.start("--element", "a", "launch.processes=12", held=0)
    wait_for(lambda: len(twelve.tasks()) == 12, of=at_work)
    for number in range(3):
        waiting = twelve.start("--element", "b", GRACE="0.002")
        wait_for(lambda seen=number + 2: len(list(twelve.folder.rglob("*.beat"))) == seen, of=waiting)
        waiting.send_signal(signal.SIGUSR2)
        assert "0 of 12 tasks of read are done" in ended(waiting, 130)
    twelve.gate.touch()
    ended(at_work)
    assert twelve.tasks() == Counter(range(12))


def test_a_claim_holds_while_its_owner_changes_its_file_and_no_longer(tmp_path, monkeypatch):
    """By the clock of the process that looks."""
    now = itertools.count()
    monkeypatch.setattr(locks.time, "monotonic", lambda: next(now))
    monkeypatch.setattr(locks, "SILENT_S", 10)
    with Claims(tmp_path) as ours, Claims(tmp_path) as theirs:
        theirs.owner = "another-node-7-x"
        beat = tmp_path / "another-node-7-x.beat"
        assert theirs.take("one") and not ours.take("one") and ours.take("two") and not theirs.take("two")
        for number in range(30):
            beat.write_text(str(number))
            assert not ours.void(["one", "two"])
        while not (void := ours.void(["one", "two"])):
            assert next(now) < 60
        assert [*void] == ["one"] and ours.take("one", void)
        assert not theirs.take("one", void), "who looked before it was claimed again takes it from nobody"
        theirs.owner = f"{os.uname().nodename}-{2**22 + 1}-x"
        assert theirs.take("three") and [*ours.void(["three"])] == ["three"], "there is no such process here"
        assert ours.count() == 3
    assert not [path for path in tmp_path.iterdir() if not path.suffix]


@pytest.mark.parametrize(("stage", "arguments"), [
    ("shard", ["--element", "a/b"]), ("shard", ["--element", "a", "--force"]), ("train", ["--element", "a"])])
def test_what_cannot_be_an_element_is_refused(place, capsys, stage, arguments):
    assert stage_main(stage, shard, ["--config", str(place / "c.yaml"), *arguments]) == 2
    assert "tasks that processes share (shard, tokenizer, encode)" in capsys.readouterr().err
    assert not (place / "runs").exists()
