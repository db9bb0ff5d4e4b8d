"""Stages in units that are asked to stop: units that are finished stay, nothing half-done does, the rest follows."""

import json
import os
import signal
import subprocess
import sys
from collections import Counter

import pytest

from pipeline.contract.manifest import read_manifest
from pipeline.contract.state import read_state
from pipeline.files import read_json, read_lines
from tests.conftest import environment
from tests.stages.test_shard import files_source, write_config
from tests.waiting import HANG_S, wait_for

STAGE = '''
import os, sys, time
from pathlib import Path
from pipeline.contract.entry import stage_main
from pipeline.files import append_line, atomic_file, output_record
from pipeline.contract import stopping
from pipeline.contract.stage_work import Unit

stopping.GRACE = float(os.environ["GRACE"])

def make(folder, number):
    with atomic_file(folder / f"{number}.txt", "w") as file:
        file.write(str(number))
        append_line(Path(os.environ["LOG"]), {"unit": number, "process": os.getpid()})
        while number >= int(os.environ["HELD"]) and not Path(os.environ["GATE"]).exists():
            time.sleep(0.005)
    return {"outputs": [output_record(folder, folder / f"{number}.txt")]}

def body(work):
    records = work.do_units("read", [Unit(str(number), number) for number in range(12)], make)
    while os.environ.get("AFTER") and not Path(os.environ["GATE"]).exists():
        append_line(Path(os.environ["LOG"]), {"after": 1})
        time.sleep(0.005)
    work.commit([output for record in records for output in record["outputs"]], {"docs": 12})

if __name__ == "__main__":
    sys.exit(stage_main("shard", body))
'''
"""Twelve units; those from HELD on wait for the file GATE while their output is half-written."""


class Held:
    """The stage, started in processes of its own."""

    def __init__(self, place):
        (place / "corpus.txt").write_text("some text\n")
        self.config = write_config(place, [files_source("t", place / "corpus.txt")])
        (place / "held.py").write_text(STAGE)
        self.place, self.log, self.gate, self.folder = place, place / "log", place / "gate", place / "runs/a/shard"
        self.started = []

    def start(self, *arguments, held=4, grace=100.0, processes=2, **variables):
        process = subprocess.Popen(
            [sys.executable, str(self.place / "held.py"), "--config", str(self.config),
             f"launch.processes={processes}", *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env={**environment(), "LOG": str(self.log), "GATE": str(self.gate), "HELD": str(held),
                 "GRACE": str(grace), **variables})
        self.started.append(process)
        return process

    def begun(self):
        return Counter(line.get("unit") for line in read_lines(self.log, appended=True))

    def workers(self):
        return {line["process"] for line in read_lines(self.log, appended=True) if "process" in line}

    def records(self):
        return sorted(int(path.stem) for path in (self.folder / "units/read").rglob("*.json"))


@pytest.fixture
def held(tmp_path):
    made = Held(tmp_path)
    yield made
    for process in made.started:
        process.kill()
        process.communicate()


def ended(process, status):
    out, err = process.communicate(timeout=HANG_S)
    assert process.returncode == status, out + err
    return out + err


def alive(process):
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.parametrize("processes", [1, 2])
def test_before_a_time_limit_units_that_run_are_finished_and_no_others_begun(held, processes):
    process = held.start(processes=processes)
    wait_for(lambda: len(held.begun()) >= 4 + processes, of=process)
    process.send_signal(signal.SIGUSR2)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(1.0)  # it waits for them, as long as there is time
    begun = sorted(held.begun())
    held.gate.touch()
    told = ended(process, 130)
    assert held.records() == begun == sorted(held.begun()) and 5 <= len(begun) < 12
    state = read_state(held.folder)
    assert (state.status, state.again, state.units) == ("preempted", True, len(begun))
    assert f"SIGUSR2: {len(begun)} of 12 units of read are done, {12 - len(begun)} are left" in state.reason
    assert state.reason in told and "Traceback" not in told and read_manifest(held.folder) is None
    ended(held.start(), 0)
    assert held.begun() == Counter(range(12)), "none was done twice"
    assert read_state(held.folder).status == "done"


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize(("asked", "grace"), [(signal.SIGUSR2, 0.002), (signal.SIGTERM, 100.0)])
def test_units_that_take_too_long_are_left(held, processes, asked, grace):
    process = held.start(processes=processes, grace=grace)
    wait_for(lambda: len(held.begun()) >= 4 + processes, of=process)
    process.send_signal(asked)
    told = ended(process, 130)
    state = read_state(held.folder)
    assert (state.status, state.again, state.units) == ("preempted", asked == signal.SIGUSR2, 4), told
    assert "Traceback" not in told and held.records() == [0, 1, 2, 3]
    assert not any(map(alive, held.workers() - {process.pid}))
    held.gate.touch()
    ended(held.start(), 0)
    assert not list(held.folder.rglob("*.tmp"))
    assert {path.name for path in held.folder.glob("*.txt")} == {f"{number}.txt" for number in range(12)}


def test_a_stop_between_units_and_commit(held):
    process = held.start(held=12, AFTER="1")
    wait_for(lambda: held.begun()[None], of=process)
    process.send_signal(signal.SIGUSR2)  # nothing is left but to commit
    held.gate.touch()
    ended(process, 0)
    held.gate.unlink()
    held.log.unlink()
    process = held.start("--force", held=12, AFTER="1")
    wait_for(lambda: held.begun()[None], of=process)
    process.send_signal(signal.SIGTERM)
    ended(process, 130)
    assert read_state(held.folder).reason == "SIGTERM" and read_manifest(held.folder) is None


def test_two_starts_that_finish_no_unit_are_the_last(held):
    for part, word in (([], held.folder / "STATE.json"),
                       (["--part", "1/2"], held.folder / "units/parts/read.1-of-2.state.json")):
        for number in range(2):
            held.log.unlink(missing_ok=True)
            process = held.start(*part, held=0, grace=0.002)
            wait_for(lambda: len(held.begun()) >= 1, of=process)
            process.send_signal(signal.SIGUSR2)
            told = ended(process, 2 if number else 130)
            state = read_json(word)
            assert (state["status"], state["again"], state["units"]) == (
                ("failed", False, 0) if number else ("preempted", True, 0))
        assert "two starts in a row finished none before the time limit" in state["reason"]
        assert "(launch.shard.time)" in told and "Traceback" not in told
    assert not (held.folder / "units/parts/read.1-of-2.json").exists()
    ended(held.start(*part, held=12), 0)
    assert json.loads((held.folder / "units/parts/read.1-of-2.json").read_text())["units"] == 6
    ended(held.start(held=12), 0)
