"""Child processes: their output, requests to stop them, and their end with this process."""

from __future__ import annotations

import ctypes
import math
import os
import random
import re
import secrets
import signal
import socket
import subprocess
import sys
import termios
import threading
import time
import tty
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import IO

from drover.pipeline.contract.signed import SECRET
from drover.pipeline.core.console import Say as Say
from drover.pipeline.core.console import echo
from drover.pipeline.core.errors import UserError

Environment = Mapping[str, str]
Each = Callable[[], bool]
"""Called again and again while something runs; returning False ends it."""
POLL_S = 0.1
BROKEN_S = 12.0
"""Seconds that the other ranks get once one has failed. srun itself would wait longer for one that it cannot reach."""
KILL_S = 40.0
"""Seconds that processes get to end after SIGTERM."""
SHUTDOWN_S = 600.0
"""Seconds that processes get to save and end after the user's first request to stop."""
CHUNK = 65536
PORTS = range(20000, 30000)
"""Below the ports that the kernel hands out by itself (32768 and up)."""
_reserved: list[socket.socket] = []
_CONTROL = re.compile(rb"\x1b\[[0-9;?]*[A-Za-z]")
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_PR_SET_PDEATHSIG = 1
# Loaded here because after a fork only calls that cannot deadlock are safe.
_libc = ctypes.CDLL(None, use_errno=True)


@contextmanager
def stop_requests() -> Iterator[list[int]]:
    """Collect requests to stop (Ctrl-C, SIGTERM, a closed terminal) in a list, in order of arrival."""
    stop_signals: list[int] = []
    numbers = [number for number in STOP_SIGNALS
               if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN]  # nohup is respected
    before = {number: signal.signal(number, lambda number, frame: stop_signals.append(number)) for number in numbers}
    try:
        yield stop_signals
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def end_with_parent(parent: int) -> None:
    """Let the kernel kill this process when the thread that started it ends for any reason.

    parent: process id of the parent, to notice if it has ended already.
    """
    if hasattr(_libc, "prctl"):  # Linux; elsewhere an orphan ends when its collectives or pipes fail
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def kill_group(leader: int) -> None:
    """SIGKILL a process that leads its own session, and its children."""
    with suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)


def answer_of(command: Sequence[str], environment: Environment, timeout_s: float) -> tuple[int, str, str]:
    """A program's exit status, output and errors.

    A program that hangs is killed with its children, because a site may have wrapped the real program in a script.

    Raises:
        OSError: it cannot be started.
        subprocess.TimeoutExpired: it did not end in time.
    """
    with subprocess.Popen(command, env=environment, text=True, errors="replace", start_new_session=True,
                          stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as program:
        try:
            output, errors = program.communicate(timeout=timeout_s)
        finally:
            if program.poll() is None:
                kill_group(program.pid)
    return program.returncode, output, errors


def free_port() -> int:
    """A free port on this node (the first one), a different one for each start.

    It stays bound, without listening, until the next call: the ranks listen only some seconds later, and others may
    look for a port meanwhile.
    """
    while _reserved:
        _reserved.pop().close()
    for port in random.SystemRandom().sample(PORTS, 100):
        probe = socket.socket()
        _reserved.append(probe)
        with suppress(OSError):
            probe.bind(("", port))
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # the rank sets it too, and can bind it then
            return port
    raise UserError(f"This node has no free port among {PORTS.start}-{PORTS.stop - 1} for the ranks to meet on. Find "
                    f"out what uses them (ss -ltn), or leave the node out (launch.exclude).")


def show(target: IO[str], text: str) -> None:
    """Print, and ignore a closed terminal or pipe: it must not end a run, and the logs have the same lines."""
    with suppress(OSError):
        echo(text, file=target)


def pass_on(source: int, other_end: int, target: IO[str], log: IO[bytes]) -> None:
    """Copy everything from a pipe or pseudo-terminal until all writers have closed it.

    `target` gets it unchanged. `log` gets complete lines, and of a line that was redrawn in place the last version.
    """
    os.close(other_end)
    rest = b""
    with suppress(OSError, ValueError):  # a closed pseudo-terminal; a log that `run_local` has closed
        while chunk := os.read(source, CHUNK):
            with suppress(OSError):  # a closed terminal must not end the run
                target.buffer.write(chunk)  # type: ignore[attr-defined]
                target.buffer.flush()  # type: ignore[attr-defined]
            *lines, rest = (rest + chunk).split(b"\n")
            log.writelines(text + b"\n" for line in lines if (text := _last_drawing(line)) or not line)
            rest = rest[-CHUNK:]
    if text := _last_drawing(rest):
        log.write(text + b"\n")
        with suppress(OSError):  # a killed process left its live line; what comes next begins a new one
            target.buffer.write(b"\n")  # type: ignore[attr-defined]
    os.close(source)


def _last_drawing(line: bytes) -> bytes:
    return _CONTROL.sub(b"", line.rstrip(b"\r").rpartition(b"\r")[2])


def started(command: Sequence[str], environment: Environment, out: int | IO[bytes], errors: int | IO[bytes]
            ) -> subprocess.Popen[bytes]:
    """Start a process that ends with this one.

    In a session of its own: a terminal's Ctrl-C does not reach it, but comes from here, once. No thread may run while
    this is called, so that the code between fork and exec is safe.
    """
    return subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=out, stderr=errors,
                            start_new_session=True, preexec_fn=partial(_prepare, os.getpid()))


def meeting(address: str, port: int) -> dict[str, str]:
    """Variables that say where ranks meet. They sign what they leave in their store with the secret."""
    return {"MASTER_ADDR": address, "MASTER_PORT": str(port), SECRET: secrets.token_hex(32)}


@dataclass
class ProcessGroup:
    """Processes that end together.

    running: the started processes, by rank.
    stage: its name in messages about stopping it; empty: no messages.
    stop_signals: requests to stop, in order of arrival; the list may grow. The first asks the processes to save and
    end, the second kills them.
    failed: ranks that failed, with their exit statuses (128 + n for signal n), in order of failure.
    killed: whether they had to be killed because they did not end after SIGTERM.
    """

    running: dict[int, subprocess.Popen[bytes]]
    stage: str = ""
    stop_signals: Sequence[int] = ()
    failed: list[tuple[int, int]] = field(default_factory=list)
    killed: bool = False
    _until: float = math.inf

    @property
    def status(self) -> int:
        """The exit status of the first that failed, or 0."""
        return self.failed[0][1] if self.failed else 0

    def run(self, each: Each) -> None:
        """Wait until all have ended. If one fails, the others are ended.

        each: called again and again; returning False ends the processes.
        """
        handled = 0
        while self.running:
            time.sleep(POLL_S)
            ended = {rank: status for rank, process in self.running.items() if (status := process.poll()) is not None}
            for rank in sorted(ended, key=lambda rank: ended[rank] >= 0):  # a killed one made the others fail
                del self.running[rank]
                if status := ended[rank]:
                    self.failed.append((rank, status if status > 0 else 128 - status))
                    self._end_within(BROKEN_S)
            if len(self.stop_signals) > handled:
                handled = len(self.stop_signals)
                if self.stage:
                    show(sys.stderr, f"\nkilling {self.stage}" if handled > 1 else
                         f"\nstopping {self.stage}: it ends its present step or task and saves (once more to kill it)")
                self._end_within(0 if handled > 1 else SHUTDOWN_S)
            if not each():
                self._end_within(KILL_S)
            if time.monotonic() > self._until:
                self.killed = True
                for process in self.running.values():
                    kill_group(process.pid)

    def _end_within(self, seconds: float) -> None:
        """Ask the processes to end within that time, unless they have less time already."""
        if time.monotonic() + seconds < self._until:
            self._until = time.monotonic() + seconds
            for process in self.running.values():  # SIGTERM: Python would answer SIGINT with a traceback
                process.terminate()


def run_local(command: Sequence[str], environment: Environment, each: Each = lambda: True, stage: str = "",
             stop_signals: Sequence[int] = (), ranks: int = 0, log: Path = Path(os.devnull)) -> ProcessGroup:
    """Run a command on this machine to its end. If this process has a terminal, the command gets one.

    ranks: processes under torch.distributed; 0: one process without it. log: file for the output, which is also shown.
    each, stage, stop_signals: as of a `ProcessGroup`.
    """
    own = [dict[str, str]()]  # variables of each process
    if ranks:
        environment = {**environment, **meeting("127.0.0.1", free_port()), "WORLD_SIZE": str(ranks),
                       "LOCAL_WORLD_SIZE": str(ranks), "GROUP_RANK": "0"}
        own = [{"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]
    streams = (sys.stdout, sys.stderr)
    pipes = [os.openpty() if stream.isatty() else os.pipe() for stream in streams]
    (_, out), (_, errors) = pipes

    def resize() -> None:
        """Make the pseudo-terminals as wide as ours, so that the stage draws lines that fit. They change no byte."""
        for (read, _), stream in zip(pipes, streams, strict=True):
            with suppress(OSError, termios.error):  # no terminal, or the stage has ended
                termios.tcsetwinsize(read, termios.tcgetwinsize(stream))

    def resized_each() -> bool:
        resize()
        return each()

    resize()
    for (_, write), stream in zip(pipes, streams, strict=True):
        if stream.isatty():
            tty.setraw(write)
    with open(log, "ab", buffering=0) as log_file:
        readers = [threading.Thread(target=pass_on, args=(*pipe, stream, log_file), daemon=True)
                   for pipe, stream in zip(pipes, streams, strict=True)]
        running = [started(command, {**environment, **variables}, out, errors) for variables in own]
        for reader in readers:
            reader.start()
        group = ProcessGroup(dict(enumerate(running)), stage, stop_signals)
        group.run(resized_each)
        for reader in readers:
            reader.join(1)  # a grandchild that keeps the pipe open cannot hold us up
    return group


def _prepare(parent: int) -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGUSR1, signal.SIGUSR2))  # until the stage has its handlers
    end_with_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # the background job of a shell inherits that it is ignored
