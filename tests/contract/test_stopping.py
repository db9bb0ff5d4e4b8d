"""Stages in tasks that are asked to stop: tasks that are finished stay, nothing half-done does, the rest follows."""

import signal
import subprocess
from collections import Counter

import pytest

from drover.pipeline.contract.manifest import read_manifest
from drover.pipeline.contract.state import PROGRESS, Progress, read_state
from drover.pipeline.core.files import read_json
from tests.contract.conftest import ended
from tests.stages.training import is_running
from tests.stand_ins import in_chain
from tests.waiting import wait_for


@pytest.mark.parametrize(("stop_signal", "grace", "processes", "ends"), [
    (signal.SIGUSR2, "100", 2, True), (signal.SIGUSR2, "0.002", 1, False), (signal.SIGTERM, "100", 1, False),
    (signal.SIGKILL, "100", 2, False)])
def test_before_a_time_limit_units_that_run_may_end_and_no_others_begin(twelve, stop_signal, grace, processes, ends):
    """Tasks that take too long are left, and so are those of a stage that is killed, whose workers end with it."""
    process = twelve.start(f"launch.processes={processes}", held=4, GRACE=grace)
    wait_for(lambda: len(twelve.tasks()) >= 4 + processes and len(twelve.records()) == 4, of=process)
    process.send_signal(stop_signal)
    if ends:
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(1.0)  # it waits for them, as long as there is time
        twelve.gate.touch()
    killed = stop_signal == signal.SIGKILL
    printed = ended(process, -stop_signal if killed else 130)
    state = read_state(twelve.folder)
    before = twelve.records()
    done = len(before)
    assert sorted(before) == list(range(4 + processes * ends)) and read_manifest(twelve.folder) is None
    assert (state.status, state.again, state.units) == (
        ("running", False, None) if killed else ("preempted", stop_signal == signal.SIGUSR2, done)), printed
    if not killed:
        assert f"{stop_signal.name}: {done} of 12 tasks of read are done" in state.reason
        progress = Progress(**read_json(twelve.folder / PROGRESS))
        assert (progress.done, progress.total, progress.phase) == (done, 12, "read") and progress.left_s > 0
    wait_for(lambda: not any(map(is_running, twelve.workers() - {process.pid})))
    twelve.gate.touch()
    twelve.run(f"launch.processes={3 - processes}")
    assert not list(twelve.folder.rglob("*.tmp")) and before.items() <= twelve.records().items()
    assert len(twelve.records()) == len(read_manifest(twelve.folder).outputs) == 12
    assert not ends or twelve.tasks() == Counter(range(12)), "none was done twice"


def test_a_stop_between_units_and_commit(twelve):
    """Near a time limit the stage commits, since nothing else is left; after a request to end it does not. The launcher
    passes Ctrl-C on."""
    for request, status, job, reason in (
            (signal.SIGTERM, 130, (), "SIGTERM"), (signal.SIGTERM, 130, in_chain("local-1"), "interrupted by the user"),
            (signal.SIGUSR2, 0, (), "")):
        twelve.gate.unlink(missing_ok=True)
        twelve.log.unlink(missing_ok=True)
        process = twelve.start(*job, AFTER="1", GRACE="100")
        wait_for(lambda: twelve.tasks()[None], of=process)
        process.send_signal(request)
        if status == 0:
            twelve.gate.touch()
        ended(process, status)
        state = read_state(twelve.folder)
        assert (state.status == "done") == (read_manifest(twelve.folder) is not None) == (status == 0)
        assert state.reason == reason


@pytest.mark.parametrize(("element", "file"), [([], "STATE.json"), (["--element", "a"], "units/claims/a.json")])
def test_two_starts_that_finish_no_unit_are_the_last(twelve, element, file):
    for number in range(2):
        twelve.log.unlink(missing_ok=True)
        process = twelve.start(*element, held=0, GRACE="0.002")
        wait_for(twelve.tasks, of=process)
        process.send_signal(signal.SIGUSR2)
        message = ended(process, 2 if number else 130)
        state = read_json(twelve.folder / file)
        assert (state["status"], state["again"], state["units"]) == (
            ("failed", False, 0) if number else ("preempted", True, 0))
    assert "two starts in a row finished none before the time limit" in message
    twelve.run(*element)
    assert read_manifest(twelve.folder) is not None
