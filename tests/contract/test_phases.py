"""Stages of several phases whose units are shared out: each follows the one before it, and all make what one makes."""

import errno
import fcntl
import itertools
import os
import signal

import pytest

from drover.pipeline.contract import stage_work
from drover.pipeline.contract.manifest import read_manifest
from drover.pipeline.contract.run import done_parts
from drover.pipeline.contract.stage_work import Unit
from drover.pipeline.contract.tasks import PARTS, Ledger
from drover.pipeline.core.errors import UnusableInputError, UserError
from drover.pipeline.core.files import output_record, read_json, write_text
from tests.contract.conftest import OwnStage
from tests.cut_off import cut_off
from tests.refusal import table
from tests.stand_ins import run_of

PHASES = ("read", "sort", "sum")


class Count(OwnStage):
    """A stage that writes a file for each of its units, by phase; `refuses`: the error that those of `sum` end with."""

    def __init__(self, place, patch):
        super().__init__(place, patch, "count", phases=PHASES)
        self.scratch, self.refuses = (), None
        self.units = {"read": [f"n-{number:05d}" for number in range(40)], "sort": [f"ten-{at}" for at in range(4)],
                      "sum": [f"sum-{digit}" for digit in range(10)]}

    def body(self, work):
        assert work.part or not list(work.folder.rglob("*.tmp")), "what a killed start left takes no room"
        outputs = []
        for phase, names in self.units.items():
            units = [Unit(name, [name, len(outputs)]) for name in names]
            outputs += [record["outputs"][0] for record in work.do_units(phase, units, self.make)]
        work.commit(outputs, {"units": len(outputs)}, scratch=[work.folder / name for name in self.scratch])

    def make(self, folder, payload):
        name, before = payload
        assert len(list(folder.glob("*.txt"))) >= before, "the phase before is done"
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
    return {found.name: found.read_bytes() for found in path.glob("*.txt")}


def test_phases_in_parts_each_once_the_one_before_is_done_make_what_one_run_makes(count, capsys, monkeypatch):
    """On file systems without locks too, which is said."""
    def none(file, operation):
        raise OSError(errno.ENOLCK, "No locks available")
    assert count() == 0
    monkeypatch.setattr(fcntl, "flock", none)
    ours = contents(count.folder())
    count.made.clear()
    for number, (phase, left) in enumerate(zip(PHASES, (
            "13 of 40 units are not done (n-00001, n-00004, n-00007 and 10 more)", "in the phase sort, 1 of 4 units",
            None), strict=True)):
        run = run_of(count.place, "name=b")
        assert [done_parts(run, "count", 3, other) for other in PHASES] == [{0, 1, 2}] * number + [set()] * (3 - number)
        for index in (2, 0):
            assert count("--part", f"{index}/3", "--phase", phase, name="b") == 0
        if left:
            assert count("--part", "1/3", "--phase", PHASES[number + 1], name="b") == 2
            said, told = capsys.readouterr()
            assert left in told and f"--phase {phase}" in told and (number or "without locks" in said)
        assert count("--part", "1/3", "--phase", phase, name="b") == 0
    assert read_manifest(count.folder("b")) is None and set(count.made.values()) == {1}
    assert count(name="b") == 0 and set(count.made.values()) == {1}, "the last call did units again"
    one, other = read_manifest(count.folder()), read_manifest(count.folder("b"))
    assert contents(count.folder("b")) == ours and (one.outputs, one.counts) == (other.outputs, other.counts)


OTHER = "shard.validation_share=0.5"


def marks(count):
    return {key for key in ["unusable"] if read_json(count.folder() / "started.json").get(key)}


def test_a_refusal_that_is_none_of_the_input_gives_no_leave_to_remove_units(count, capsys):
    count.register(reads=("shard",))

    def others_are_refused():
        for arguments in ([], ["--part", "1/2"], ["--accept-changes"]):
            capsys.readouterr()
            assert count(OTHER, *arguments) == 2
            told = capsys.readouterr().err
            assert "was started with other" in told and "shard.validation_share: 0.01 -> 0.5" in told
    assert count("--part", "0/2") == 0
    assert count("--part", "0/2", "--phase", "sort") == 2  # it cannot begin
    others_are_refused()
    for phase in PHASES[:2]:
        assert count("--part", "0/1", "--phase", phase) == 0 and not marks(count)
    for count.refuses, part in ((UnusableInputError, ["--part", "0/1", "--phase", "sum"]), (UserError, [])):
        assert count(*part) == 2
        others_are_refused()
    count.refuses = None
    assert count() == 0 and set(count.made.values()) == {1}


def test_what_is_removed_after_a_refused_input_is_told_and_a_part_that_goes_on_forgets_it(count, capsys):
    count.register(reads=("shard",))
    for units in (44, 49):
        count.refuses = UnusableInputError
        assert count() == 2 and marks(count) == {"unusable"}
        assert count() == 2 and count.made.total() == units, "the same again is the same again"
        count.refuses = None
        if units == 44:
            assert count("--part", "0/2", "--phase", "sum") == 0 and not marks(count)
            assert count(OTHER) == 2
    capsys.readouterr()
    assert count(OTHER) == 0
    [told] = [line for line in capsys.readouterr().out.splitlines() if "finished units that are removed" in line]
    assert "shard.validation_share: 0.01 -> 0.5" in told and told.endswith("removed: 49")
    assert count.made["n-00000"] == 2


def test_phases_without_units_are_done_at_once_the_last_included(count):
    count.register(phases=(*PHASES, "end"))
    del count.units["sort"]
    for phase in (*PHASES, "end"):
        assert count("--part", "0/1", "--phase", phase) == 0
    assert {name: record["units"] for name, _, record in Ledger(count.folder() / PARTS).lines()} == {
        "read.0-of-1": 40, "sort.0-of-1": 0, "sum.0-of-1": 10, "end.0-of-1": 0}
    assert read_manifest(count.folder()) is None
    assert count() == 0 and set(count.made.values()) == {1}


def left(path):
    """What there is in a stage's folder of its records and of what is to go with the commit."""
    return {found.name for found in [path / "staging", path / "units"] if found.exists()}


@pytest.mark.slow
def test_killed_before_any_of_its_changes_the_next_start_ends_it(count, monkeypatch, capsys):
    """No unit that is recorded is done again, nothing half-made stays, and what was to go with the commit goes."""
    monkeypatch.setattr(stage_work, "git_state", dict)
    count.units = {phase: [f"{phase}-{number}" for number in range(2)] for phase in PHASES}
    count.scratch = "staging", "never-made"
    first = None
    for number in itertools.count():
        here = count.folder(f"k{number}")
        write_text(here / "staging/deep/x", "much")
        status = cut_off(lambda here=here: count(name=here.parent.name), here.parent, number)
        recorded = {name for path in here.glob("units/[rs]*") for name, _, _ in Ledger(path).lines()}
        committed, before = read_manifest(here) is not None, left(here)
        count.made.clear()
        capsys.readouterr()
        assert count(name=here.parent.name) == 0 and not recorded & set(count.made)
        told = "removed what was left behind when it was committed: " in capsys.readouterr().out
        assert told == (committed and bool(before))
        assert not (committed and count.made) and not left(here)
        assert not list(here.rglob("*.tmp"))
        found = contents(here), read_manifest(here).outputs
        first = first or found
        assert found == first
        if number and status == 0:  # it came to its end
            break
        assert status == (-signal.SIGKILL if number else 0)
    assert number > 40
    (here / "sum-1.txt").unlink()
    assert count(name=here.parent.name) == 0 and set(count.made.values()) == {1}
    assert (contents(here), read_manifest(here).outputs) == first and not left(here)


@pytest.mark.parametrize(("arguments", "told"), table("""
    --part 0/2 --phase write -> has no phase write to divide into parts. Give --phase one of read, sort
    --phase read -> Give --part I/N, too""", str.split))
def test_what_is_no_phase_is_refused(count, capsys, arguments, told):
    assert count(*arguments) == 2
    assert told in capsys.readouterr().err and not count.folder().exists()


VALUES = ("one", "k", 1), ("two", "k", {"large": 2**70, "name": "\udce9", "text": "a\nb\u2028"}), ("one", "l", [1.5])


def test_a_ledger_cut_anywhere_has_the_tasks_whose_lines_are_whole_and_goes_on(tmp_path):
    ledger = Ledger(tmp_path / "ledger")
    for task in VALUES:
        ledger.add(*task)
    [path] = ledger.folder.iterdir()
    data = path.read_bytes()
    for cut in range(len(data) + 1):
        path.write_bytes(data[:cut])
        whole = data[:cut].count(b"\n")
        assert list(ledger.lines()) == list(VALUES[:whole])
        ledger.add("three", "k", cut)
        whole += data[cut:cut + 1] == b"\n"  # which is set right
        assert list(ledger.lines()) == [*VALUES[:whole], ("three", "k", cut)]


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
    assert ledger.found({"two": "k", "one": "l", "three": "k"}) == {"two": VALUES[1][2], "one": [1.5]}
    ledger.add("two", "k", None)
    assert ledger.found({"two": "k", "one": "l"}) == {"one": [1.5]}
    ledger.add("four", "k", 1)
    ledger.add("four", "k", None)
    assert ledger.of_key("k") == {"one": 2}  # the newest, whatever the files are called
