"""Stages done in parts: several processes at once, as on several nodes, make what one makes, and nothing twice."""

import errno
import json
import os
import signal
import subprocess
import sys
from collections import Counter

import pytest

from pipeline.config.loading import load_config
from pipeline.contract import locks
from pipeline.contract.entry import stage_main
from pipeline.contract.manifest import read_manifest
from pipeline.contract.run import Run, done_parts
from pipeline.contract.state import read_state
from pipeline.files import read_json, read_lines
from pipeline.shard import shard
from tests.conftest import REPOSITORY, environment, stage_command
from tests.stages.test_shard import files_source, make_corpus, write_config
from tests.waiting import HANG_S, wait_for

TWELVE = '''
import os, sys, time
from pathlib import Path
from pipeline.contract.entry import stage_main
from pipeline.errors import UserError
from pipeline.files import append_line, output_record, write_text
from pipeline.contract.stage_work import Unit

def make(folder, number):
    append_line(Path(os.environ["LOG"]), {"unit": number, "process": os.getpid()})
    gate = os.environ.get("GATE")
    while gate and number > 3 and not Path(gate).exists():
        time.sleep(0.005)
    path = folder / f"{number}.txt"
    write_text(path, str(number) * 1000)
    return {"outputs": [output_record(folder, path)]}

def body(work):
    if os.environ.get("REFUSE"):
        raise UserError("the corpus is in Latin-1")
    records = work.do_units("read", [Unit(str(number), number) for number in range(12)], make)
    work.commit([output for record in records for output in record["outputs"]], {"docs": 12})

if __name__ == "__main__":
    sys.exit(stage_main("shard", body))
'''
"""A stage of twelve units, which log who does them; from unit 4 on they wait for the file GATE, if that is asked."""


@pytest.fixture
def corpus(tmp_path):
    """A config over two generated sources in twelve files, each a unit of shard, and many small shards."""
    make_corpus(tmp_path / "in")
    sources = [files_source(name, tmp_path / "in" / name / "*.jsonl") for name in ("web", "books")]
    return write_config(tmp_path, sources, shard_mb=0.04, heldout_share=0.1)


@pytest.fixture
def twelve(tmp_path):
    """Start the stage of twelve units in a process: a function of its arguments and what is added to its environment.
    Whatever still runs at the end is killed."""
    (tmp_path / "corpus.txt").write_text("some text\n")
    config = write_config(tmp_path, [files_source("t", tmp_path / "corpus.txt")])
    (tmp_path / "twelve.py").write_text(TWELVE)
    started = []

    def start(*arguments, **variables):
        command = [sys.executable, str(tmp_path / "twelve.py"), "--config", str(config), *arguments]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                                   env={**environment(), "LOG": str(tmp_path / "log"), **variables})
        started.append(process)
        return process
    start.folder, start.config, start.log, start.gate = (tmp_path / "runs/a/shard", config, tmp_path / "log",
                                                         tmp_path / "gate")
    yield start
    for process in started:
        process.kill()
        process.communicate()


def ended(process, status=0):
    """What a process said once it ended, as it should."""
    out, err = process.communicate(timeout=HANG_S)
    assert process.returncode == status, out + err
    return out + err


def times_done(start):
    """How often each unit was begun."""
    return Counter(line["unit"] for line in read_lines(start.log))


def records(start):
    return {path.stem: path.stat().st_mtime_ns for path in (start.folder / "units/read").rglob("*.json")}


def in_parts(stage, config, parts, chosen, *overrides):
    """Run some parts of a real stage at the same time."""
    processes = [subprocess.Popen([*stage_command(stage, config, *overrides), "--part", f"{index}/{parts}"],
                                  cwd=REPOSITORY, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                                  text=True) for index in chosen]
    return [ended(process) for process in processes]


def run_whole(stage, config, *overrides):
    process = subprocess.Popen(stage_command(stage, config, *overrides), cwd=REPOSITORY, env=environment(),
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    return ended(process)


def test_shards_and_tokens_made_in_parts_are_those_of_one_run(corpus):
    settings = ("tokenizer.kind=byte",)
    for stage in ("shard", "tokenizer", "encode"):
        run_whole(stage, corpus, *settings)
    one, other = (corpus.parent / "runs" / name for name in "ab")
    settings = (*settings, "name=b")
    said = in_parts("shard", corpus, 3, range(3), *settings)
    assert all("read: 4/4 units" in text for text in said) and read_manifest(other / "shard") is None
    assert len(list((other / "shard/units/read").rglob("*.json"))) == 12
    assert not (other / "shard/units/write").exists() and read_state(other / "shard") is None
    run_whole("shard", corpus, *settings)
    assert not (other / "shard/units/parts").exists() and not (other / "shard/staging").exists()
    run_whole("tokenizer", corpus, *settings)
    in_parts("encode", corpus, 3, range(3), *settings)
    units = {path: path.stat().st_mtime_ns for path in (other / "encode/units/encode").rglob("*.json")}
    assert len(units) == len(read_manifest(one / "encode").outputs) > 6
    run_whole("encode", corpus, *settings)
    assert units == {path: path.stat().st_mtime_ns for path in units}, "the last call did units again"
    for stage in ("shard", "encode"):
        ours, theirs = read_manifest(other / stage), read_manifest(one / stage)
        assert (ours.outputs, ours.counts) == (theirs.outputs, theirs.counts) and ours.digest == theirs.digest
    assert "up to date" in in_parts("encode", corpus, 3, [1], *settings)[0]


def test_what_nobody_did_the_last_call_does(corpus):
    run_whole("shard", corpus)
    in_parts("shard", corpus, 3, [0, 2], "name=b")
    assert done_parts(Run(load_config(corpus, ["name=b"])), "shard", 3, "read") == {0, 2}
    run_whole("shard", corpus, "name=b")
    one, other = (read_manifest(corpus.parent / "runs" / name / "shard") for name in "ab")
    assert one.outputs == other.outputs and one.counts == other.counts


def test_a_killed_part_goes_on_with_its_share(twelve):
    part = twelve("--part", "1/2", GATE=str(twelve.gate))
    other = twelve("--part", "0/2", GATE=str(twelve.gate))
    wait_for(lambda: times_done(twelve)[5] and times_done(twelve)[4], of=part)
    part.kill()
    part.communicate()
    assert part.returncode == -signal.SIGKILL
    before = records(twelve)
    assert sorted(before) == ["0", "1", "2", "3"]
    again = twelve("--part", "1/2")  # while the other is at work
    assert "part 1/2" in ended(again)
    twelve.gate.touch()
    ended(other)
    markers = {path.name: read_json(path) for path in (twelve.folder / "units/parts").iterdir()}
    assert {name: (marker["units"], marker["found"]) for name, marker in markers.items()} == {
        "read.0-of-2.json": (6, 0), "read.1-of-2.json": (6, 2)}
    ended(twelve())
    assert times_done(twelve) == Counter([*range(12), 5]), "only the unit that was being done is done again"
    assert before.items() <= records(twelve).items()
    assert read_manifest(twelve.folder).counts == {"docs": 12}


def test_parts_forced_together_start_afresh_once(twelve):
    ended(twelve())
    (twelve.folder / "old.txt").touch()
    twelve.log.unlink()
    forced = ("--force-id", "chain-7")
    parts = [twelve("--part", f"{index}/3", *forced) for index in range(3)]
    for part in parts:
        ended(part)
    assert not (twelve.folder / "old.txt").exists()
    assert read_json(twelve.folder / "started.json")["force_id"] == "chain-7"
    assert len(records(twelve)) == 12 and read_manifest(twelve.folder) is None
    ended(twelve("--part", "0/3", *forced))  # as after a requeue
    ended(twelve(*forced))
    assert times_done(twelve) == Counter(range(12))
    assert "up to date" in ended(twelve(*forced)) and "up to date" in ended(twelve("--part", "2/3", *forced))
    assert "up to date" in ended(twelve())
    assert times_done(twelve) == Counter(range(12))
    ended(twelve("--force-id", "chain-8"))
    assert times_done(twelve) == Counter([*range(12)] * 2)


def test_a_part_that_comes_later_joins_what_was_forced(twelve):
    ended(twelve())
    twelve.log.unlink()
    first = twelve("--part", "0/3", "--force-id", "x", GATE=str(twelve.gate))
    wait_for(lambda: times_done(twelve)[6], of=first)
    (twelve.folder / "9.txt.other-node-1.tmp").touch()  # what a third part may be writing
    ended(twelve("--part", "1/3", "--force-id", "x"))
    assert (twelve.folder / "9.txt.other-node-1.tmp").exists()
    assert "is in use by" in ended(twelve("--part", "2/3", "--force-id", "y"), 2)
    twelve.gate.touch()
    ended(first)
    ended(twelve("--force-id", "x"))
    assert times_done(twelve) == Counter(range(12)) and not list(twelve.folder.rglob("*.tmp"))


def test_while_a_part_works_neither_the_whole_nor_the_same_part_nor_another_cut_does(twelve):
    part = twelve("--part", "0/2", GATE=str(twelve.gate), SLURM_JOB_ID="4711")
    wait_for(lambda: times_done(twelve)[4], of=part)
    holder = f"in use by process {part.pid} on {os.uname().nodename}, Slurm job 4711"
    for arguments in ([], ["--force"], ["--part", "0/2"], ["--part", "1/3"]):
        told = ended(twelve(*arguments), 2)
        assert holder in told and "Traceback" not in told
    assert read_state(twelve.folder) is None
    twelve.gate.touch()
    ended(part)
    ended(twelve("--part", "1/3"))
    whole = twelve(GATE=str(twelve.gate))
    ended(whole)
    assert times_done(twelve) == Counter(range(12))


def test_while_the_whole_works_no_part_does(twelve):
    whole = twelve(GATE=str(twelve.gate))
    wait_for(lambda: times_done(twelve)[4], of=whole)
    assert f"in use by process {whole.pid}" in ended(twelve("--part", "0/2"), 2)
    assert read_state(twelve.folder).status == "running"
    twelve.gate.touch()
    ended(whole)
    assert times_done(twelve) == Counter(range(12))


def test_starts_follow_each_other(twelve):
    (twelve.folder.parent / ".locks").mkdir(parents=True)
    held = locks.lock(twelve.folder.parent, "shard.start")
    part = twelve("--part", "0/2")
    assert f"waits while process {os.getpid()}" in part.stdout.readline()
    assert not twelve.folder.exists()
    held.close()
    ended(part)
    assert len(records(twelve)) == 6


def test_parts_of_a_corrected_input_start_afresh_together(twelve):
    for index in range(2):
        assert "Latin-1" in ended(twelve("--part", f"{index}/2", REFUSE="1"), 2)
    assert read_state(twelve.folder) is None
    (twelve.folder / "left.txt").touch()
    parts = [twelve("--part", f"{index}/2", "shard.heldout_share=0.5") for index in range(2)]
    for part in parts:
        ended(part)
    ended(twelve("shard.heldout_share=0.5"))
    assert times_done(twelve) == Counter(range(12)) and not (twelve.folder / "left.txt").exists()


def test_parts_of_other_settings_are_not_done(twelve):
    for index in (0, 2):
        ended(twelve("--part", f"{index}/3"))

    def done(*overrides, parts=3):
        return done_parts(Run(load_config(twelve.config, list(overrides))), "shard", parts, "read")
    assert done() == done("launch.processes=2") == {0, 2} and done(parts=2) == set()
    assert done("shard.heldout_share=0.5") == done("name=b") == set()
    (twelve.folder / "units/parts/read.0-of-3.json").write_text("{")  # as a full disk may leave it
    assert done() == {2}
    (twelve.folder.parents[2] / "corpus.txt").write_text("other text\n")
    assert done() == set()


def test_more_parts_than_units(twelve):
    for part in [twelve("--part", f"{index}/13") for index in (11, 12)]:
        ended(part)
    assert done_parts(Run(load_config(twelve.config)), "shard", 13, "read") == {11, 12}
    assert list(records(twelve)) == ["11"]


@pytest.mark.parametrize(("arguments", "told"), [
    (["--part", "2/2"], "--part 2/2 is not a part"), (["--part", "-1/2"], "--part -1/2 is not"),
    (["--part", "0/0"], "--part 0/0 is not"), (["--part", "one"], "--part one is not"),
    (["--part", "0/2", "--force"], "--force-id")])
def test_what_is_no_part_is_refused(corpus, capsys, arguments, told):
    if arguments[1].startswith("-"):
        arguments = ["=".join(arguments)]
    assert stage_main("shard", shard, ["--config", str(corpus), *arguments]) == 2
    assert told in capsys.readouterr().err and not (corpus.parent / "runs").exists()


def test_a_stage_without_units_has_no_parts(corpus, capsys):
    assert stage_main("tokenizer", shard, ["--config", str(corpus), "--part", "0/2"]) == 2
    assert "cannot be done in parts; shard, encode can" in capsys.readouterr().err


def test_without_locks_parts_still_work(corpus, capsys, monkeypatch):
    def none(file, operation):
        raise OSError(errno.ENOLCK, "No locks available")
    monkeypatch.setattr(locks.fcntl, "flock", none)
    another = corpus.parent / "runs/a/shard/staging/web-00000.npy.other-node-1.tmp"  # of a part that started meanwhile
    another.parent.mkdir(parents=True)
    another.touch()
    for part in (["--part", "1/2"], ["--part", "0/2"]):
        assert stage_main("shard", shard, ["--config", str(corpus), *part]) == 0 and another.exists()
    assert stage_main("shard", shard, ["--config", str(corpus)]) == 0 and not another.exists()
    told = capsys.readouterr().out
    assert told.count("without locks") == 1 and "read: 12/12 units" in told
    assert json.loads((corpus.parent / "runs/a/shard/manifest.json").read_text())["counts"]["documents_in"] == 1800
