"""Workers are started once and kept; whatever happens to one, none outlives the stage."""

import os
import signal
import threading
import time
from contextlib import closing, suppress

import pytest

from drover.pipeline.contract import workers as module
from drover.pipeline.contract.workers import StopRequest, Task, Workers
from drover.pipeline.core.errors import UserError
from tests.refusal import refused
from tests.waiting import HANG_S, wait_for

PHASES = 3
TASKS = 40
AT = 3
KILLED = "A worker process was killed, as the kernel does when memory runs out"


class OddError(Exception):
    """One that can be written and not be read."""

    def __init__(self, one, other):
        super().__init__(f"{one} and {other}")


def kill(process, how=signal.SIGKILL):
    os.kill(process, how)
    time.sleep(HANG_S)


def refuse(error):
    raise error


NOTHING = type(None), ""
HAPPENS = {
    "nothing": (lambda stage: None, NOTHING),
    "killed": (lambda stage: kill(os.getpid()), (UserError, KILLED)),
    "source killed": (lambda stage: kill(os.getppid()), (UserError, KILLED)),
    "refusal": (lambda stage: refuse(UserError("not that")), (UserError, "not that")),
    "memory": (lambda stage: refuse(MemoryError("too little")), (MemoryError, "too little")),
    "defect": (lambda stage: refuse(OddError(1, 2)), (RuntimeError, "OddError: 1 and 2")),
    "warned": (lambda stage: os.kill(stage, signal.SIGUSR2), NOTHING),
    "asked": (lambda stage: kill(stage, signal.SIGTERM), NOTHING),
    "Ctrl-C": (lambda stage: kill(stage, signal.SIGINT), (KeyboardInterrupt, "")),
}
"""What happens in a task, and the error that the stage then sees."""


def task(folder, payload):
    phase, number, event, stage = payload
    (folder / f"{phase}-{number}.{os.getpid()}").touch()
    if number == AT:
        HAPPENS[event][0](stage)
    elif event != "nothing":
        time.sleep(0.1)  # so that not all are done before what happens is seen
    return {"process": os.getpid(), "source": os.getppid(), "made": f"{phase}-{number}"}


def alive(process):
    with suppress(ProcessLookupError):
        os.kill(process, 0)
        return True


@pytest.fixture
def forked(monkeypatch):
    """As in a process of a stage, which has no threads when it begins. This one may have some, of other tests."""
    monkeypatch.setattr(module, "_has_threads", lambda: False)


@pytest.mark.parametrize("event", HAPPENS)
def test_in_the_last_phase(tmp_path, forked, event):
    stage, ends = os.getpid(), PHASES - 1
    done = []
    error = None
    stopped = None
    with closing(Workers(2)) as workers, StopRequest() as stop:
        try:
            for phase in range(PHASES):
                tasks = [Task(str(number), (phase, number, event if phase == ends else "nothing", stage))
                         for number in range(TASKS)]
                for name, record in workers.do(task, tmp_path, tasks, stop):
                    assert record["made"] == f"{phase}-{name}"
                    done.append(record)
                if stop.heard:
                    stopped = phase
                    break
        except (UserError, MemoryError, RuntimeError, KeyboardInterrupt) as raised:
            error = raised
        started = {path.stem: int(path.suffix[1:]) for path in tmp_path.iterdir()}
        if event in ("killed", "source killed", "asked", "Ctrl-C"):
            wait_for(lambda: not any(map(alive, started.values())))
    assert not any(map(alive, {*started.values(), done[0]["source"]}))
    assert len({*started.values()}) <= 2 and stage not in started.values(), "two workers are started for all phases"
    made = [record["made"] for record in done]
    left = set(started) - set(made)
    last = [name for name in started if name.startswith(str(ends))]
    assert sorted([*made, *left]) == sorted(started) and left <= set(last)
    expected, words = HAPPENS[event][1]
    assert type(error) is expected and words in str(error)
    assert stopped == (ends if event in ("warned", "asked") else None)
    if event == "nothing":
        assert len(made) == PHASES * TASKS
        return
    assert max(started)[0] == str(ends) and (event == "source killed" or len(last) < TASKS), "no other task is begun"
    if event in ("refusal", "memory", "defect"):
        assert left == {f"{ends}-{AT}"}, "what was at work at the same time is done"
    elif event == "warned":
        assert not left
    else:
        assert f"{ends}-{AT}" in left and len(left) <= 4, "two that were at work, and two that were not recorded yet"
    if event == "defect":
        assert "in refuse" in error.__notes__[0]


def test_what_dies_between_phases_is_told_in_the_next(tmp_path, forked):
    tasks = [Task(str(number), (0, number, "nothing", 0)) for number in range(TASKS)]
    with closing(Workers(2)) as workers, StopRequest() as stop:
        records = [record for _, record in workers.do(task, tmp_path, tasks, stop)]
        os.kill(records[0]["process"], signal.SIGKILL)
        refused(UserError, KILLED, list, workers.do(task, tmp_path, tasks, stop))


KEPT = []


def leave_pieces(folder, size):
    """Take so much in pieces, of which the last stays; the process's memory before."""
    with open("/proc/self/statm") as file:
        pages = int(file.read().split()[1])
    pieces = [bytes(1000) for _ in range(size // 1000)]
    KEPT.append(pieces[-1:])
    return {"pages": pages}


def test_between_phases_memory_is_given_back(tmp_path, forked):
    with closing(Workers(2)) as workers, StopRequest() as stop:
        before, after = ([record["pages"] for _, record in workers.do(
            leave_pieces, tmp_path, [Task(str(number), size) for number in range(2)], stop)]
            for size in (100_000_000, 0))
    assert max(after) - min(before) < 20_000_000 // os.sysconf("SC_PAGE_SIZE")


HELD = threading.Lock()


def take(folder, payload):
    with HELD:
        return {"process": os.getpid()}


def test_a_process_with_threads_is_not_forked(tmp_path):
    """What one of them holds would be held in the workers for ever."""
    over = threading.Event()
    thread = threading.Thread(target=lambda: HELD.acquire() and over.wait() and HELD.release())
    thread.start()
    try:
        with closing(Workers(2)) as workers:
            tasks = [Task(str(number), number) for number in range(3)]
            result = [record["process"] for _, record in workers.do(take, tmp_path, tasks, StopRequest())]
    finally:
        over.set()
        thread.join()
    assert len(result) == 3 and os.getpid() not in result
