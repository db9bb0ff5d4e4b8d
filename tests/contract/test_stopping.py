"""Stages in units that are asked to stop: units that are finished stay, nothing half-done does, the rest follows."""

import signal
import subprocess
from collections import Counter

import pytest

from drover.pipeline.contract.manifest import read_manifest
from drover.pipeline.contract.state import PROGRESS, Progress, read_state
from drover.pipeline.contract.tasks import marked_parts
from drover.pipeline.core.files import read_json
from tests.contract.conftest import ended
from tests.stages.training import is_running
from tests.waiting import wait_for


@pytest.mark.parametrize("processes", [1, 2])
def test_before_a_time_limit_units_that_run_are_finished_and_no_others_begun(twelve, processes):
    process = twelve.start(f"launch.processes={processes}", held=4, GRACE="100")
    wait_for(lambda: len(twelve.units()) >= 4 + processes, of=process)
    process.send_signal(signal.SIGUSR2)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(1.0)  # it waits for them, as long as there is time
    begun = sorted(twelve.units())
    twelve.gate.touch()
    told = ended(process, 130)
    assert sorted(twelve.records()) == begun == sorted(twelve.units()) and 5 <= len(begun) < 12
    state = read_state(twelve.folder)
    assert (state.status, state.again, state.units) == ("preempted", True, len(begun))
    assert f"SIGUSR2: {len(begun)} of 12 units of read are done, {12 - len(begun)} are left" in state.reason
    assert state.reason in told and read_manifest(twelve.folder) is None
    progress = Progress(**read_json(twelve.folder / PROGRESS))
    assert (progress.done, progress.total, progress.phase) == (len(begun), 12, "read") and progress.left_s > 0
    twelve.run(f"launch.processes={3 - processes}")
    assert twelve.units() == Counter(range(12)), "none was done twice"
    assert read_state(twelve.folder).status == "done"


@pytest.mark.parametrize(("asked", "grace", "processes"), [
    (signal.SIGUSR2, "0.002", 2), (signal.SIGTERM, "100", 1), (signal.SIGUSR2, "0.002", 1),
    (signal.SIGKILL, "100", 2)])
def test_units_that_take_too_long_are_left(twelve, asked, grace, processes):
    """And so are those of a stage that is killed, whose workers end with it."""
    process = twelve.start(f"launch.processes={processes}", held=4, GRACE=grace)
    wait_for(lambda: len(twelve.units()) >= 4 + processes and len(twelve.records()) == 4, of=process)
    process.send_signal(asked)
    killed = asked == signal.SIGKILL
    told, state = ended(process, -asked if killed else 130), read_state(twelve.folder)
    assert (state.status, state.again, state.units) == (
        ("running", False, None) if killed else ("preempted", asked == signal.SIGUSR2, 4)), told
    before = twelve.records()
    assert sorted(before) == [0, 1, 2, 3] and read_manifest(twelve.folder) is None
    wait_for(lambda: not any(map(is_running, twelve.workers() - {process.pid})))
    twelve.gate.touch()
    twelve.run("launch.processes=2")
    assert not list(twelve.folder.rglob("*.tmp")) and before.items() <= twelve.records().items()
    assert len(twelve.records()) == len(read_manifest(twelve.folder).outputs) == 12


def test_a_stop_between_units_and_commit(twelve):
    """Before a limit nothing is left but to commit; who is asked to end does not."""
    for asked, status in ((signal.SIGTERM, 130), (signal.SIGUSR2, 0)):
        twelve.gate.unlink(missing_ok=True)
        twelve.log.unlink(missing_ok=True)
        process = twelve.start(AFTER="1", GRACE="100")
        twelve.wait_for(process, None)
        process.send_signal(asked)
        if status == 0:
            twelve.gate.touch()
        ended(process, status)
        state = read_state(twelve.folder)
        assert (state.status == "done") == (read_manifest(twelve.folder) is not None) == (status == 0)
        assert status == 0 or state.reason == "SIGTERM"


def test_two_starts_that_finish_no_unit_are_the_last(twelve):
    for part, word in (([], twelve.folder / "STATE.json"),
                       (["--part", "1/2"], twelve.folder / "units/parts/read.1-of-2.state.json")):
        for number in range(2):
            twelve.log.unlink(missing_ok=True)
            process = twelve.start(*part, held=0, GRACE="0.002")
            wait_for(twelve.units, of=process)
            process.send_signal(signal.SIGUSR2)
            told = ended(process, 2 if number else 130)
            state = read_json(word)
            assert (state["status"], state["again"], state["units"]) == (
                ("failed", False, 0) if number else ("preempted", True, 0))
        assert "two starts in a row finished none before the time limit" in state["reason"]
        assert "(launch.shard.time)" in told
    assert not marked_parts(twelve.folder, 2, "read")
    twelve.run(*part)
    assert marked_parts(twelve.folder, 2, "read") == {1}
    twelve.run()
