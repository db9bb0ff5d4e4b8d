"""Shared by the tests of the contract."""

from collections import Counter

import pytest

from drover.pipeline.contract.stages import STAGES, Stage
from drover.pipeline.core.files import Ledger, read_lines
from tests.conftest import environment, warm_server
from tests.stand_ins import call, never
from tests.waiting import HANG_S


class OwnStage:
    """A stage of its own whose body and tasks run in this process; `made` counts the tasks by name."""

    def __init__(self, place, patch, name, **stage):
        self.place = place
        self.name = name
        self.made = Counter()
        patch.setitem(STAGES, name, Stage(name, needs=(), reads=("shard",), code=(), own_module="x", **stage))

    def __call__(self, *arguments, name="a", body=None):
        return call(self.place, self.name, body or self.body, f"name={name}", *arguments)

    def folder(self, name="a"):
        return self.place / "runs" / name / self.name


class Twelve:
    """A run of the stage of twelve tasks (tests/contract/twelve.py), and what its processes left."""

    def __init__(self, place):
        self.place = place
        self.log = place / "log"
        self.gate = place / "gate"
        self.folder = place / "runs/a/shard"
        self.started = []

    def start(self, *arguments, held=12, **variables):
        """held: the first task that waits for the gate."""
        process = warm_server().start(
            ["tests.contract.twelve", "--config", str(self.place / "c.yaml"), *arguments],
            {**environment(), "LOG": str(self.log), "GATE": str(self.gate), "HELD": str(held), **variables})
        self.started.append(process)
        return process

    def run(self, *arguments, status=0, **options):
        """The stage from its start to its end; what it said."""
        return ended(self.start(*arguments, **options), status)

    def tasks(self):
        """How often each task was started."""
        return Counter(line.get("task") for line in read_lines(self.log, appended=True))

    def workers(self):
        return {line["process"] for line in read_lines(self.log, appended=True) if "process" in line}

    def records(self):
        """What is recorded of each task that is done."""
        return {int(name): record for name, _, record in Ledger(self.folder / "units/read").lines()}



def ended(process, status=0):
    """Wait for the end of a process; what it said."""
    printed = "".join(process.communicate(HANG_S))
    assert process.returncode == status and "Traceback" not in printed, printed
    return printed


@pytest.fixture
def refusal(place, capsys):
    """Function: what a stage of the run in `place` says when it refuses to begin or to end."""
    def refused(stage, *arguments, body=never):
        capsys.readouterr()
        assert call(place, stage, body, *arguments) == 2
        return capsys.readouterr().err
    return refused


@pytest.fixture
def twelve(place):
    """The stage of twelve tasks; whatever of it still runs at the end is killed."""
    made = Twelve(place)
    yield made
    for process in made.started:
        process.kill()
        process.wait()
