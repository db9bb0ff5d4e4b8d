"""The processes that do a stage's units: forked when the first phase needs them, and kept for all phases.

A fork takes milliseconds; an interpreter that imports the stage takes half a second. But a fork is only safe in a
process without threads, open stores and locks. So one process is forked before the stage has any of them, and forks the
workers when they are needed: the source.
"""

from __future__ import annotations

import ctypes
import gc
import os
import pickle
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from multiprocessing import Pipe, get_context
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NoReturn

from drover.pipeline.contract.stopping import SIGNALS, Stopped, StopRequest
from drover.pipeline.contract.tasks import Record, Unit
from drover.pipeline.core.errors import UserError
from drover.pipeline.core.orphans import end_with_parent

POLL_S = 0.5
"""Between two looks whether the stage is to stop, while units are done."""


class Workers:
    """Up to `most` processes that do units; with one, this process does them itself.

    Create it before anything is opened, locked or started: workers are as this process is then, with its imports and
    its hash seed. In a process that has threads already the source is an interpreter of its own. All end with this
    process, however it ends.
    """

    def __init__(self, most: int = 1) -> None:
        self.most, self._started = most, list[Connection]()
        self._source: Any = None
        if most > 1:
            gc.freeze()  # else the collector of each process touches, and so copies, all that they share
            self._start_source("fork")
            if _has_threads():  # what they held is held in the fork for ever
                self.close()
                self._start_source("spawn")

    def close(self) -> None:
        """Kill the workers, whatever they do; returns when they have ended."""
        if self._source is not None:
            self._control.close()
            self._source.join()
            for worker in self._started:
                worker.close()
            self._source = None
            gc.unfreeze()

    def do(self, function: Callable[[Path, Any], Record], folder: Path, units: list[Unit],
           stop: StopRequest) -> Iterator[tuple[str, Record]]:
        """Yield (name, record) as units finish. A single unit is done in place. So are all where there is one process:
        a debugger can step in.

        Asked to stop, it begins no other unit, and ends when those that run have; or without them once `stop` is over.
        The same after a unit has failed, and then it raises what that raised. Ctrl-C kills what runs.

        Raises:
            UserError: a worker was killed.
        """
        if self.most == 1 or len(units) <= 1:
            yield from _in_place(function, folder, units, stop)
            return
        waiting, running, made = iter(units), dict[Connection, str](), list[tuple[str, Record]]()
        failure: BaseException | None = None
        try:
            with stop.waiting():  # also while a record is written: each turn of the loop looks for a request
                idle = self._workers(len(units))
                while True:
                    while idle and not stop.heard and failure is None and (unit := next(waiting, None)) is not None:
                        worker = idle.pop()
                        running[worker] = unit.name
                        worker.send((function, folder, unit.payload))
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
                        name, failure = running.pop(worker), failure or error
                        if error is None:
                            made.append((name, record))
                for worker in idle if not running else ():
                    worker.send(None)
        except (EOFError, ConnectionError):
            yield from made
            raise UserError("A worker process was killed, as the kernel does when memory runs out (see dmesg). Set "
                            "launch.processes lower and run the same command again; finished units are kept.") from None
        finally:
            if running:
                # What they had not finished writing is removed at the next start, or before the commit: to look for it
                # among a million files may take longer than there is.
                self.close()
        if failure is not None:
            raise failure

    def _start_source(self, method: str) -> None:
        self._control, theirs = socket.socketpair()
        self._source = get_context(method).Process(target=_fork_workers, args=(self._control, theirs))  # type: ignore[attr-defined]
        self._source.start()
        theirs.close()

    def _workers(self, count: int) -> list[Connection]:
        """As many workers as there are units for, none of which is at work."""
        while len(self._started) < min(count, self.most):
            ours, theirs = Pipe()
            self._started.append(ours)
            with theirs:
                socket.send_fds(self._control, [b"."], [theirs.fileno()])
        return self._started[:count]


def _in_place(function: Callable[[Path, Any], Record], folder: Path, units: list[Unit],
              stop: StopRequest) -> Iterator[tuple[str, Record]]:
    for unit in units:
        if stop.heard:
            return
        try:
            with stop.working():
                record = function(folder, unit.payload)
        except Stopped:
            return
        yield unit.name, record


def _has_threads() -> bool:
    """Whether this process has another thread. Asked after a fork: OpenBLAS ends its threads before one."""
    tasks = Path("/proc/self/task")
    return not tasks.is_dir() or len(list(tasks.iterdir())) > 1


def _fork_workers(stage: socket.socket, control: socket.socket) -> NoReturn:
    """The source: fork a worker for every connection that arrives; kill them all when the stage has closed its end."""
    stage.close()
    source, workers = os.getpid(), list[int]()
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for number in (signal.SIGINT, *SIGNALS):  # Ctrl-C and the rest are the stage's to handle
            signal.signal(number, signal.SIG_IGN)
        while files := socket.recv_fds(control, 1, 1)[1]:
            os.set_inheritable(files[0], False)  # else a program that a unit starts would hold it open
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
    """A worker: do units until there is nobody to give others."""
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
    """Give back what the phase that has ended took: the next one may need as much, in other processes."""
    gc.collect()
    if (arrow := sys.modules.get("pyarrow")) is not None:
        arrow.default_memory_pool().release_unused()
    with suppress(AttributeError):  # not glibc
        ctypes.CDLL(None).malloc_trim(0)


def _portable(error: BaseException) -> BaseException:
    """The error as it can be sent, with its traceback as a note."""
    trace = traceback.format_exc()
    try:
        error = pickle.loads(pickle.dumps(error))
    except Exception:  # noqa: BLE001 - whatever its class does
        error = UserError(str(error)) if isinstance(error, UserError) else \
            RuntimeError(f"{type(error).__name__}: {error}")
    error.add_note(f"In a worker process:\n{trace}")
    return error
