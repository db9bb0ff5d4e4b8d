"""Stages of several passes of tasks: each follows the one before it, and what is done stays done; the ledger."""

import errno
import fcntl
import itertools
import os
import signal

import pytest

from drover.pipeline.contract import stage_work
from drover.pipeline.contract.manifest import read_manifest
from drover.pipeline.contract.stage_work import Task
from drover.pipeline.core.errors import UnusableInputError, UserError
from drover.pipeline.core.files import Ledger, output_record, read_json, write_text
from tests.contract.conftest import OwnStage
from tests.cut_off import cut_off

PASSES = ("read", "sort", "sum")


class Count(OwnStage):
    """A stage that writes a file for each of its tasks, by pass; `refuses`: the error that those of `sum` end with."""

    def __init__(self, place, patch):
        super().__init__(place, patch, "count")
        self.scratch = ()
        self.refuses = None
        self.tasks = {"read": [f"n-{number:05d}" for number in range(40)], "sort": [f"ten-{at}" for at in range(4)],
                      "sum": [f"sum-{digit}" for digit in range(10)]}

    def body(self, work):
        assert work.element or not list(work.folder.rglob("*.tmp")), "what a killed start left takes no room"
        outputs = []
        for name, names in self.tasks.items():
            tasks = [Task(each, [each, len(outputs)]) for each in names]
            outputs += [record["outputs"][0] for record in work.run_pass(name, tasks, self.make)]
        work.commit(outputs, {"tasks": len(outputs)}, scratch=[work.folder / name for name in self.scratch])

    def make(self, folder, payload):
        name, before = payload
        assert len(list(folder.glob("*.txt"))) >= before, "the pass before is done"
        if self.refuses and name.startswith("sum"):
            raise self.refuses("the corpus is in Latin-1")
        self.made[name] += 1
        write_text(folder / f"{name}.txt", f"{name} comes after {before}")
        return {"outputs": [output_record(folder, folder / f"{name}.txt")]}


@pytest.fixture
def count(place, monkeypatch):
    """The stage, and a run to do it in."""
    return Count(place, monkeypatch)


def contents(path):
    return {file.name: file.read_bytes() for file in path.glob("*.txt")}


def test_an_element_makes_what_one_process_makes_on_file_systems_without_locks_too(count, capsys, monkeypatch):
    def none(file, operation):
        raise OSError(errno.ENOLCK, "No locks available")
    assert count() == 0
    monkeypatch.setattr(fcntl, "flock", none)
    assert count("--element", "a", name="b") == 0 and set(count.made.values()) == {2}
    assert "without locks" in capsys.readouterr().out
    one = read_manifest(count.folder())
    other = read_manifest(count.folder("b"))
    assert contents(count.folder("b")) == contents(count.folder())
    assert (one.outputs, one.counts) == (other.outputs, other.counts)


OTHER = "shard.validation_share=0.5"


def is_unusable(count):
    return bool(read_json(count.folder() / "started.json").get("unusable"))


def test_units_are_removed_only_if_the_input_itself_was_refused(count, capsys):
    count.refuses = UserError
    for element in ([], ["--element", "a"]):
        assert count(*element) == 2 and not is_unusable(count) and count.made.total() == 44
        for arguments in ([], ["--accept-changes"], element):
            capsys.readouterr()
            assert count(OTHER, *arguments) == 2
            message = capsys.readouterr().err
            assert "was made with other" in message and "shard.validation_share: 0.01 -> 0.5" in message
    count.refuses = UnusableInputError
    for element in ([], ["--element", "a"]):
        assert count(*element) == 2 and is_unusable(count)
    assert count.made.total() == 44, "the same again is the same again"
    count.refuses = None
    capsys.readouterr()
    assert count(OTHER) == 0
    [message] = [line for line in capsys.readouterr().out.splitlines() if "finished tasks that are removed" in line]
    assert "shard.validation_share: 0.01 -> 0.5" in message and message.endswith("removed: 44")
    assert count.made["n-00000"] == 2


def left(path):
    """What there is in a stage's folder of its records and of what is to go with the commit."""
    return {item.name for item in [path / "staging", *path.glob("units/*")] if item.exists()}


LASTING = {"sum"}


@pytest.mark.slow
def test_killed_before_any_of_its_changes_the_next_start_ends_it(count, monkeypatch, capsys):
    """No task that is recorded is done again, nothing half-made stays, and what was to go with the commit goes."""
    monkeypatch.setattr(stage_work, "git_state", dict)
    monkeypatch.setattr(os, "fsync", lambda file: None)  # no power cut comes
    count.tasks = {name: [f"{name}-{number}" for number in range(2)] for name in PASSES}
    count.scratch = "staging", "never-made"
    first = None
    for number in itertools.count():
        folder = count.folder(f"k{number}")
        write_text(folder / "staging/deep/x", "much")
        status = cut_off(lambda folder=folder: count(name=folder.parent.name), folder.parent, number)
        recorded = {name for path in folder.glob("units/[rs]*") for name, _, _ in Ledger(path).lines()}
        committed = read_manifest(folder) is not None
        before = left(folder)
        count.made.clear()
        capsys.readouterr()
        assert count(name=folder.parent.name) == 0 and not recorded & set(count.made)
        removed = "removed what was left behind when it was committed: " in capsys.readouterr().out
        assert removed == (committed and not before <= LASTING)
        assert not (committed and count.made) and left(folder) == LASTING
        assert not list(folder.rglob("*.tmp"))
        result = contents(folder), read_manifest(folder).outputs
        first = first or result
        assert result == first
        if number and status == 0:  # it came to its end
            break
        assert status == (-signal.SIGKILL if number else 0)
    assert number > 40
    (folder / "sum-1.txt").unlink()
    assert count(name=folder.parent.name) == 0 and count.made["sum-1"] == 1 and not count.made["sum-0"]
    assert left(folder) == LASTING


VALUES = ("one", "k", 1), ("two", "k", {"large": 2**70, "name": "\udce9", "text": "a\nb\u2028"}), ("one", "l", [1.5])


def test_a_ledger_cut_anywhere_has_the_tasks_whose_lines_are_whole_and_goes_on(tmp_path):
    ledger = Ledger(tmp_path / "ledger")
    for task in VALUES:
        ledger.add(*task)
    [path] = ledger.folder.iterdir()
    data = path.read_bytes()
    for cut in range(len(data) + 1):
        path.write_bytes(data[:cut])
        lines = data[:cut].count(b"\n")
        assert list(ledger.lines()) == list(VALUES[:lines])
        ledger.add("three", "k", cut)
        lines += data[cut:cut + 1] == b"\n"  # which is set right
        assert list(ledger.lines()) == [*VALUES[:lines], ("three", "k", cut)]


def test_a_damaged_line_of_a_ledger_does_not_count(tmp_path):
    ledger = Ledger(tmp_path)
    for task in VALUES:
        ledger.add(*task)
    [path] = tmp_path.iterdir()
    data = path.read_bytes()
    for at in range(len(data)):
        path.write_bytes(data[:at] + bytes([data[at] ^ 1 << at % 6]) + data[at + 1:])
        assert set(map(str, ledger.lines())) < set(map(str, VALUES)), at


def test_ledgers_of_several_processes_are_one_and_what_is_taken_back_is_not_done(tmp_path):
    ledger = Ledger(tmp_path)
    for name, key, record in VALUES:
        ledger.add(name, key, record)
        (path,) = tmp_path.glob(f"*-{os.getpid()}.jsonl")
        path.rename(tmp_path / f"node-{name}-{key}.jsonl")
    ledger.add("one", "k", 2)
    assert ledger.recorded({"two": "k", "one": "l", "three": "k"}) == {"two": VALUES[1][2], "one": [1.5]}
    ledger.add("two", "k", None)
    assert ledger.recorded({"two": "k", "one": "l"}) == {"one": [1.5]}
    ledger.add("four", "k", 1)
    ledger.add("four", "k", None)
    assert ledger.of_key("k") == {"one": 2}  # the newest, whatever the files are called
