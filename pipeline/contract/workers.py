"""Tasks that are done once, the processes that do them, and requests to stop.

The processes are forked when the first pass needs them, and serve all passes.

A fork takes milliseconds; an interpreter that imports the stage takes half a second. But a fork is only safe in a
process without threads, open stores and locks. So the stage forks one process, the source, before it has any of them.
The source forks the workers when they are needed.
"""

from __future__ import annotations

import ctypes
import gc
import math
import os
import pickle
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import chain, islice
from multiprocessing import Pipe, get_context
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from drover.pipeline.contract.state import LOCAL, this_job
from drover.pipeline.core.background import end_with_parent
from drover.pipeline.core.console import Say
from drover.pipeline.core.errors import UserError
from drover.pipeline.core.files import Ledger, Record, problems_of

TASKS = "units"
"""In a stage's folder: the ledgers of its passes (the name that format 1 gave it), and the claims."""
CLAIMS = f"{TASKS}/claims"
TaskFunction = Callable[[Path, Any], Record]
"""(the stage's folder, a task's payload) -> the task's record."""
Done = tuple[str, Record]
"""The name of a finished task, and its record."""


@dataclass(frozen=True)
class Task:
    """A task of a stage: a readable name, and the argument of its function."""

    name: str
    payload: Any


def with_outputs(records: dict[str, Record], folder: Path, say: Say) -> dict[str, Record]:
    """The records whose `outputs` exist in the stage's folder and have their recorded sizes."""
    outputs = [(name, output) for name, record in records.items() for output in record.get("outputs", [])]
    problems = problems_of(folder, [output for _, output in outputs])
    lost = {name: problem for (name, _), problem in zip(outputs, problems, strict=True) if problem}
    for problem in lost.values():
        say(f"{problem}: making it again")
    return {name: record for name, record in records.items() if name not in lost}


def finished_tasks(stage_folder: Path) -> int:
    """How many finished tasks of all passes are recorded in a stage's folder."""
    return sum(len({name for name, _, _ in Ledger(folder).lines()}) for folder in (stage_folder / TASKS).glob("*"))


WARNINGS = (signal.SIGUSR1, signal.SIGUSR2)
"""They warn that a time limit is near. Another job may continue at once."""
SIGNALS = (signal.SIGTERM, *WARNINGS)
"""Python itself handles Ctrl-C."""
GRACE = 0.6
"""The share of the time between warning and limit in which running tasks may end."""


class Stopped(BaseException):  # not an error: `except Exception` must not catch it
    """The stage leaves its body because of a request to stop.

    reason: in words. hopeless: whether so many starts in a row have finished no task that continuing is useless. facts:
    more of the stage's final status (`drover.pipeline.contract.state.StageState`).
    """

    def __init__(self, reason: str, hopeless: bool = False, **facts: Any) -> None:
        super().__init__(reason)
        self.reason = reason
        self.hopeless = hopeless
        self.facts = facts


def cause_of(signal_name: str) -> str:
    """The name of a signal, or that the user sent it: a command on this machine passes Ctrl-C on as SIGTERM."""
    return "interrupted by the user" if signal_name == "SIGTERM" and this_job().chain.startswith(LOCAL) else signal_name


class StopRequest:
    """The requests that this process receives between `__enter__` and `__exit__`.

    Args:
        warned_s: seconds from the warning to the time limit.
        signals: further signals that count as requests.
        waits: whether the process only reads `heard`. Then a request never raises `Stopped`.
    """

    def __init__(self, warned_s: float = 120.0, signals: tuple[signal.Signals, ...] = (), waits: bool = False) -> None:
        self._grace = GRACE * warned_s
        self._signals = (*SIGNALS, *signals)
        self._requests: set[str] = set()
        self._before: dict[signal.Signals, Any] = {}
        self._until = math.inf
        self._waits = waits
        self._works = False

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():  # only the main thread can handle signals
            self._before = {number: signal.signal(number, self._note) for number in self._signals}
            self._before[signal.SIGALRM] = signal.signal(signal.SIGALRM, self._end)
            self._mask = signal.pthread_sigmask(signal.SIG_UNBLOCK, self._signals)
        return self

    def __exit__(self, *_: object) -> None:
        if self._before:
            # A launcher may have blocked the signals until a handler was there. Then they are blocked again.
            signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @property
    def heard(self) -> bool:
        """Whether there was a request, so that no other task may start."""
        return bool(self._requests)

    @property
    def over(self) -> bool:
        """Whether to stop waiting for running tasks."""
        return time.monotonic() >= self._until

    @property
    def reason(self) -> str:
        """The names of the signals, or who sent them."""
        return " and ".join(sorted(map(cause_of, self._requests)))

    @property
    def again(self) -> bool:
        """Whether a time limit is the only reason, so that another job may continue at once."""
        return not self._requests - {number.name for number in WARNINGS}

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """A context in which other processes do the tasks. The caller polls `heard` and `over`; nothing is raised."""
        self._waits = True
        try:
            yield
        finally:
            self._waits = False

    @contextmanager
    def working(self) -> Iterator[None]:
        """A context in which this process does a task. `Stopped` interrupts the task once the request is `over`."""
        self._works = True
        try:
            yield
        finally:
            self._works = False
            if self._before:
                signal.setitimer(signal.ITIMER_REAL, 0)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._requests.add(signal.Signals(number).name)
        wait_s = self._grace if number in WARNINGS else 0.0
        self._until = min(self._until, time.monotonic() + wait_s)
        if not wait_s:
            self._end(number, frame)
        elif self._works:
            signal.setitimer(signal.ITIMER_REAL, wait_s)

    def _end(self, number: int, frame: FrameType | None) -> None:
        if not self._waits:
            raise Stopped(self.reason, again=self.again)


POLL_S = 0.5
"""How often to check whether the stage is to stop, while tasks are done."""


class Workers:
    """Up to `most` processes that do tasks. If `most` is 1, this process does them itself.

    Create it before anything is opened, locked or started. Workers have the imports and the hash seed that this process
    has at that moment. If this process already has threads, the source is a new interpreter. All of them end with this
    process, even if it is killed.
    """

    def __init__(self, most: int = 1) -> None:
        self.most = most
        self._started = list[Connection]()
        self._source: Any = None
        if most > 1:
            gc.freeze()  # otherwise each process's collector would touch, and so copy, all shared memory
            self._start_source("fork")
            if _has_threads():  # locks that they held would stay locked in the fork
                self.close()
                self._start_source("spawn")

    def close(self) -> None:
        """Kill the workers, even during a task. Returns when they have ended."""
        if self._source is not None:
            self._control.close()
            self._source.join()
            for worker in self._started:
                worker.close()
            self._source = None
            gc.unfreeze()

    def do(self, function: TaskFunction, folder: Path, tasks: Iterable[Task],
           stop: StopRequest) -> Iterator[Done]:
        """Yield (name, record) as tasks finish. This process itself does a single task, or all tasks if `most` is 1, so
        that a debugger can step in. The next task is taken from `tasks` when a worker is idle.

        After a request to stop it starts no other task. It ends when the running tasks have ended, or once `stop` is
        over. After a task has failed it does the same, and then raises the task's error. Ctrl-C kills running tasks.

        Raises:
            UserError: a worker was killed.
        """
        waiting = iter(tasks)
        first = [] if self.most == 1 else list(islice(waiting, 2))
        waiting = chain(first, waiting)
        if len(first) < 2:
            yield from _in_place(function, folder, waiting, stop)
            return
        running = dict[Connection, str]()
        made = list[Done]()
        failure: BaseException | None = None
        try:
            with stop.waiting():  # also while a record is written: each turn of the loop checks for a request
                idle = [*self._started]
                while True:
                    while ((idle or len(self._started) < self.most) and not stop.heard and failure is None
                           and (task := next(waiting, None)) is not None):
                        worker = idle.pop() if idle else self._start_worker()
                        running[worker] = task.name
                        worker.send((function, folder, task.payload))
                    yield from made  # while the workers do what they were just given
                    made.clear()
                    if not running or stop.over:
                        break
                    ready = wait(list(running), POLL_S)
                    for worker in [worker for worker in running if worker in ready]:
                        try:
                            record, error = worker.recv()
                        except OSError:  # it was killed while it sent
                            raise EOFError from None
                        idle.append(worker)
                        name = running.pop(worker)
                        failure = failure or error
                        if error is None:
                            made.append((name, record))
                for worker in idle if not running else ():
                    worker.send(None)
        except (EOFError, ConnectionError):
            yield from made
            raise UserError("A worker process was killed, as the kernel does when memory runs out (see dmesg). Set "
                            "launch.processes lower and run the same command again; finished tasks are kept.") from None
        finally:
            if running:
                # Their temporary files are removed at the next start, or before the commit. There may be no time now
                # to search for them among a million files.
                self.close()
        if failure is not None:
            raise failure

    def _start_source(self, method: str) -> None:
        self._control, theirs = socket.socketpair()
        self._source = get_context(method).Process(target=_fork_workers, args=(self._control, theirs))  # type: ignore[attr-defined]
        self._source.start()
        theirs.close()

    def _start_worker(self) -> Connection:
        ours, theirs = Pipe()
        self._started.append(ours)
        with theirs:
            socket.send_fds(self._control, [b"."], [theirs.fileno()])
        return ours


def _in_place(function: TaskFunction, folder: Path, tasks: Iterable[Task],
              stop: StopRequest) -> Iterator[Done]:
    for task in tasks:
        if stop.heard:
            return
        try:
            with stop.working():
                record = function(folder, task.payload)
        except Stopped:
            return
        yield task.name, record


def _has_threads() -> bool:
    """Whether this process has another thread. Call it after a fork, before which OpenBLAS ends its threads."""
    tasks = Path("/proc/self/task")
    return not tasks.is_dir() or len(list(tasks.iterdir())) > 1


def _fork_workers(stage: socket.socket, control: socket.socket) -> NoReturn:
    """The source process: fork a worker for every connection that arrives; kill all when the stage closes its end."""
    stage.close()
    source = os.getpid()
    workers = list[int]()
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for number in (signal.SIGINT, *SIGNALS):  # only the stage itself handles them
            signal.signal(number, signal.SIG_IGN)
        while files := socket.recv_fds(control, 1, 1)[1]:
            os.set_inheritable(files[0], False)  # otherwise a program that a task starts would hold it open
            if not (worker := os.fork()):
                control.close()
                _work(Connection(files[0]), source)
            workers.append(worker)
            os.close(files[0])
    except BaseException:  # noqa: BLE001 - the stage sees only that the workers are gone
        traceback.print_exc()
    finally:
        for worker in workers:
            os.kill(worker, signal.SIGKILL)
        for worker in workers:
            os.waitpid(worker, 0)
        os._exit(0)


def _work(connection: Connection, source: int) -> NoReturn:
    """A worker process: do tasks until the stage has ended."""
    try:
        end_with_parent(source)
        while True:
            if (task := connection.recv()) is None:
                _release_memory()
                continue
            function, folder, payload = task
            answer: tuple[Record | None, BaseException | None]
            try:
                answer = function(folder, payload), None
            except BaseException as error:  # noqa: BLE001 - the stage raises it
                answer = None, _portable(error)
            sys.stdout.flush()
            connection.send(answer)
    except EOFError:  # the stage has ended
        pass
    except BaseException:  # noqa: BLE001 - the stage sees only that this worker is gone
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(0)


def _release_memory() -> None:
    """Free the memory of the pass that has ended: the next pass may need it in other processes."""
    gc.collect()
    if (arrow := sys.modules.get("pyarrow")) is not None:
        arrow.default_memory_pool().release_unused()
    with suppress(AttributeError):  # not glibc
        ctypes.CDLL(None).malloc_trim(0)


def _portable(error: BaseException) -> BaseException:
    """The error in a form that can be pickled, with its traceback as a note."""
    trace = traceback.format_exc()
    try:
        error = pickle.loads(pickle.dumps(error))
    except Exception:  # noqa: BLE001 - pickling may raise anything
        error = UserError(str(error)) if isinstance(error, UserError) else \
            RuntimeError(f"{type(error).__name__}: {error}")
    error.add_note(f"In a worker process:\n{trace}")
    return error
