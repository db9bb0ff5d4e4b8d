"""Stages of several phases whose units are shared out: each follows the one before it, and all make what one makes."""

import itertools
import json
import signal
from collections import Counter

import pytest

from pipeline.config.loading import load_config
from pipeline.contract import stage_work
from pipeline.contract.entry import stage_main
from pipeline.contract.manifest import read_manifest
from pipeline.contract.run import Run, done_parts
from pipeline.contract.stage_work import Unit
from pipeline.contract.stages import STAGES, Stage
from pipeline.contract.units import UnitRecords, unit_keys
from pipeline.errors import UnusableInputError, UserError
from pipeline.files import output_record, read_json, sha256_json, write_text
from tests.cut_off import cut_off
from tests.stages.test_shard import files_source, write_config


class Count:
    """A stage that writes numbers, sorts each ten of them by their last digit, and adds up what it sorted."""

    def __init__(self, place, numbers=40):
        self.place, self.numbers, self.made, self.sorts = place, numbers, Counter(), True
        self.digits, self.scratch = 10, ()

    def __call__(self, *arguments, name="a"):
        return stage_main("count", self.body, ["--config", str(self.place / "c.yaml"), "launch.processes=1",
                                               f"name={name}", *arguments])

    def body(self, work):
        numbers = [Unit(f"n-{number:05d}", number) for number in range(self.numbers)]
        made = work.do_units("read", numbers, self.write)
        tens = [Unit(f"ten-{at}", [record["outputs"][0]["path"] for record in made[at:at + 10]])
                for at in range(0, self.numbers, 10)]
        outputs = [record["outputs"][0] for record in made]
        if self.sorts:
            outputs += [record["outputs"][0] for record in work.do_units("sort", tens, self.sort)]
        sums = [Unit(f"sum-{digit}", [digit, sha256_json(outputs)]) for digit in range(self.digits)]
        outputs += [record["outputs"][0] for record in work.do_units("sum", sums, self.sum)]
        work.commit(outputs, {"numbers": self.numbers}, scratch=[work.folder / name for name in self.scratch])

    def write(self, folder, number):
        return self._written(folder, f"n-{number:05d}", str(number * 7 % 100))

    def sort(self, folder, paths):
        read = [(folder / path).read_text() for path in paths]
        return self._written(folder, f"sorted-{paths[0][:-4]}", " ".join(sorted(read, key=lambda text: text[-1])))

    def sum(self, folder, payload):
        read = [int(text) for path in folder.glob("sorted-*.txt") for text in path.read_text().split()]
        return self._written(folder, f"sum-{payload[0]}", str(sum(value for value in read if value % 10 == payload[0])))

    def _written(self, folder, name, text):
        self.made[name] += 1
        write_text(folder / f"{name}.txt", text)
        return {"outputs": [output_record(folder, folder / f"{name}.txt")]}


PHASES = ("read", "sort", "sum")


@pytest.fixture
def count(tmp_path, monkeypatch):
    """The stage, and a run to do it in."""
    (tmp_path / "corpus.txt").write_text("some text\n")
    write_config(tmp_path, [files_source("t", tmp_path / "corpus.txt")])
    monkeypatch.setitem(STAGES, "count", Stage("count", needs=(), reads=(), code=(), phases=PHASES, own_module="x"))
    return Count(tmp_path)


def folder(count, name="a"):
    return count.place / "runs" / name / "count"


def contents(path):
    return {found.name: found.read_bytes() for found in path.glob("*.txt")}


def test_phases_in_parts_make_what_one_run_makes(count):
    assert count() == 0
    ours = contents(folder(count))
    count.made.clear()
    for phase in PHASES:
        run = Run(load_config(count.place / "c.yaml", ["name=b"]))
        assert [done_parts(run, "count", 3, other) for other in PHASES] == [
            {0, 1, 2} if PHASES.index(other) < PHASES.index(phase) else set() for other in PHASES]
        for index in (2, 0, 1):
            assert count("--part", f"{index}/3", "--phase", phase, name="b") == 0
    assert read_manifest(folder(count, "b")) is None and set(count.made.values()) == {1}
    done = count.made.total()
    assert count(name="b") == 0 and count.made.total() == done, "the last call did units again"
    one, other = read_manifest(folder(count)), read_manifest(folder(count, "b"))
    assert contents(folder(count, "b")) == ours and len(ours) == 54
    assert (one.outputs, one.counts) == (other.outputs, other.counts)


def test_a_phase_starts_when_the_one_before_is_done(count, capsys):
    for index in (0, 2):
        assert count("--part", f"{index}/3") == 0
    assert count("--part", "1/3", "--phase", "sort") == 2
    told = capsys.readouterr().err
    assert "13 of 40 units are not done (n-00001, n-00004, n-00007 ...)" in told and "--phase read" in told
    assert not list(folder(count).glob("sorted*"))
    assert count("--part", "1/3") == 0 and count("--part", "1/3", "--phase", "sort") == 0
    assert "of the phase sort, 3 of 4 units" in (count("--part", "0/3", "--phase", "sum"), capsys.readouterr().err)[1]
    assert count() == 0, "a run without --part does all that is left"
    assert set(count.made.values()) == {1}


OTHER = "shard.heldout_share=0.5"


@pytest.fixture
def settings(monkeypatch):
    """The stage is made of settings, so that others can be asked for."""
    monkeypatch.setitem(STAGES, "count", Stage("count", (), ("shard",), (), phases=PHASES, own_module="x"))


def marks(count):
    return {key for key in ("failed", "unusable") if read_json(folder(count) / "started.json").get(key)}


def test_a_part_that_cannot_begin_gives_no_leave_to_remove_units(count, settings, capsys):
    assert count("--part", "0/2") == 0
    assert count("--part", "0/2", "--phase", "sort") == 2
    for arguments in ([], ["--part", "1/2"]):
        capsys.readouterr()
        assert count(OTHER, *arguments) == 2 and "shard.heldout_share: 0.01 -> 0.5" in capsys.readouterr().err
    assert count("--part", "1/2") == 0 and not marks(count)
    assert count(OTHER) == 2 and count() == 0 and set(count.made.values()) == {1}


@pytest.mark.parametrize(("error", "part"), [
    (UserError, []), (UnusableInputError, ["--part", "0/1", "--phase", "sum"])])
def test_a_refusal_that_is_none_of_the_input_keeps_the_units(count, settings, capsys, monkeypatch, error, part):
    for phase in PHASES[:2]:
        assert count("--part", "0/1", "--phase", phase) == 0
    with monkeypatch.context() as patched:
        refuse(count, patched, error)
        assert count(*part) == 2
    assert count(OTHER) == 2 and "shard.heldout_share: 0.01 -> 0.5" in capsys.readouterr().err
    assert count() == 0 and set(count.made.values()) == {1}


def refuse(count, monkeypatch, error=UnusableInputError):
    """From now on the stage fails in its last phase."""
    def fail(folder, payload):
        raise error("the corpus is in Latin-1")
    monkeypatch.setattr(count, "sum", fail)


def test_what_is_removed_after_the_input_was_refused_is_told(count, settings, capsys, monkeypatch):
    with monkeypatch.context() as patched:
        refuse(count, patched)
        assert count() == 2 and marks(count) == {"failed", "unusable"}
        assert count() == 2 and count.made.total() == 44, "the same again is the same again"
    capsys.readouterr()
    assert count(OTHER) == 0
    [told] = [line for line in capsys.readouterr().out.splitlines() if "finished units that are removed" in line]
    assert "shard.heldout_share: 0.01 -> 0.5" in told and told.endswith("removed: 44")
    assert count.made["n-00000"] == 2


def test_a_part_that_goes_on_after_a_refusal_forgets_it(count, settings, monkeypatch):
    with monkeypatch.context() as patched:
        refuse(count, patched)
        assert count() == 2 and marks(count)
    assert count("--part", "0/2", "--phase", "sum") == 0 and not marks(count)
    assert count(OTHER) == 2 and count() == 0 and set(count.made.values()) == {1}


def test_phases_without_units_are_done_at_once_the_last_included(count, monkeypatch):
    phases = (*PHASES, "end")
    monkeypatch.setitem(STAGES, "count", Stage("count", (), (), (), phases=phases, own_module="x"))
    count.sorts = False
    for phase in phases:
        for index in range(2):
            assert count("--part", f"{index}/2", "--phase", phase) == 0
    for phase in ("sort", "end"):
        assert read_json(folder(count) / f"units/parts/{phase}.1-of-2.json")["units"] == 0
    assert done_parts(Run(load_config(count.place / "c.yaml")), "count", 2, "sort") == {0, 1}
    assert not list(folder(count).glob("sorted*")) and read_manifest(folder(count)) is None
    assert count() == 0 and set(count.made.values()) == {1}


def left(path):
    """What there is in a stage's folder of its records and of what is to go with the commit."""
    return {str(found.relative_to(path)) for name in ("staging", "units", "scratch.json")
            for found in [path / name, *(path / name).glob("*")] if found.exists()}


LASTING = {"units", "units/sum", "units/sum.jsonl"}


def test_killed_before_any_of_its_changes_the_next_start_ends_it(count, monkeypatch, capsys):
    """No unit that is recorded is done again, nothing half-made stays, and what was to go with the commit goes."""
    monkeypatch.setattr("pipeline.contract.units.MANY", 1)
    monkeypatch.setattr(stage_work, "git_state", dict)
    count.numbers, count.digits, count.scratch = 2, 2, ("staging", "never-made")
    ended = {}
    for number in itertools.count():
        here = folder(count, f"k{number}")
        write_text(here / "staging/deep/x", "much")
        status = cut_off(lambda here=here: count(name=here.parent.name), here.parent, number)
        recorded = {path.stem for path in here.glob("units/[rs]*/*.json")}
        committed, before = read_manifest(here) is not None, left(here)
        count.made.clear()
        capsys.readouterr()
        assert count(name=here.parent.name) == 0 and not recorded & set(count.made)
        told = "removed what was left behind when it was committed: " in capsys.readouterr().out
        assert told == (committed and not before <= {*LASTING, "scratch.json"})
        assert not (committed and count.made) and left(here) == LASTING
        assert {path.name[:6] for path in here.rglob("*.tmp")} <= ({"STATE."} if committed else set())
        found = contents(here), read_manifest(here).outputs
        assert found == ended.setdefault("first", found)
        if number and status == 0:  # it came to its end
            break
        assert status == (-signal.SIGKILL if number else 0)
    assert number > 40
    (here / "sum-1.txt").unlink()
    assert count(name=here.parent.name) == 0 and count.made["sum-1"] == 1 and not count.made["sum-0"]
    assert left(here) == LASTING


@pytest.mark.parametrize(("arguments", "told"), [
    (["--part", "0/2", "--phase", "write"], "has no phase write to share out. Give --phase one of read, sort, sum"),
    (["--phase", "read"], "Give --part I/N with it")])
def test_what_is_no_phase_is_refused(count, capsys, arguments, told):
    assert count(*arguments) == 2
    assert told in capsys.readouterr().err and not folder(count).exists()


def test_many_units_are_gathered_in_one_file(count, monkeypatch, capsys):
    monkeypatch.setattr("pipeline.contract.units.MANY", 30)
    monkeypatch.setattr(stage_work, "MANY", 30)
    monkeypatch.setattr("pipeline.contract.threads.AT_ONCE", 7)  # several batches
    whole = folder(count) / "units/read.jsonl"
    for index in range(2):
        assert count("--part", f"{index}/2") == 0 and not whole.exists()
    assert count("--part", "0/2", "--phase", "sort") == 0
    *lines, seal = [json.loads(line) for line in whole.read_text().splitlines()]
    assert [line["unit"] for line in lines] == [f"n-{number:05d}" for number in range(40)] and set(seal) == {"seal"}
    for path in (folder(count) / "units/read").rglob("*.json"):
        path.unlink()  # nobody needs them now
    assert count("--part", "1/2", "--phase", "sort") == 0 and count("--part", "0/1", "--phase", "sum") == 0
    (folder(count) / "n-00017.txt").unlink()
    count.made.clear()
    assert count() == 0
    assert set(count.made) == {"n-00017"}
    assert capsys.readouterr().out.count("n-00017.txt is missing or cut") == 1
    count.made.clear()
    (folder(count) / "n-00018.txt").write_text("cut")
    assert count() == 0 and set(count.made) == {"n-00018"}, "the finished stage is mended"
    *lines, seal = [json.loads(line) for line in whole.read_text().splitlines()]
    assert len(lines) == 40
    whole.write_text(whole.read_text().replace("n-00018", "n-00019", 1))  # damaged
    (folder(count) / "n-00020.txt").unlink()
    count.made.clear()
    assert count() == 0 and set(count.made) == {"n-00020"}


def test_records_that_one_parser_reads_otherwise_are_not_gathered(tmp_path, monkeypatch):
    monkeypatch.setattr("pipeline.contract.units.MANY", 2)
    units = [Unit("one", 1), Unit("two", {"large": 2 ** 70, "name": "\udce9"})]
    keys, store = unit_keys({"config": {}}, "read", units), UnitRecords(tmp_path, "read", print)
    assert keys == unit_keys({"config": {}}, "read", units) and len(set(keys.values())) == 2
    for large, gathered in ((2 ** 70, False), (float("nan"), False), (2 ** 60, True)):
        records = {"one": {"count": 1}, "two": {"count": large, "name": "\udce9"[:not gathered]}}
        store.gather(keys, records)
        assert store.is_gathered() == gathered and not list(tmp_path.rglob("*.tmp"))
    assert store.found(keys) == records


def test_no_folder_holds_more_than_a_thousand_records(tmp_path):
    store = UnitRecords(tmp_path, "read", print)
    names = (f"{source}-{number:05d}" for source in ("web", "s-1") for number in range(12_500))
    held = Counter(store.path(name).parent for name in names)
    assert len(held) == 26 and set(held.values()) == {1000, 500}
    assert store.path("vocabulary").parent == store.folder == tmp_path / "units/read"
