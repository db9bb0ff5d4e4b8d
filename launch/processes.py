"""Processes that this one starts: their output, requests to stop them, and that none outlives it."""

from __future__ import annotations

import ctypes
import fcntl
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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import IO, TypeVar

from drover.pipeline.contract.signed import SECRET
from drover.pipeline.core.errors import UserError

Environment = Mapping[str, str]
Started = TypeVar("Started", bound="subprocess.Popen[bytes]")
Say = Callable[[str], None]
Each = Callable[[], bool]
"""Called all along while something runs; ends it by answering False."""
POLL_S = 0.1
BROKEN_S = 12.0
"""Seconds that the other ranks get once one has ended badly. srun itself would wait longer for one that it cannot
reach."""
KILL_S = 40.0
"""Seconds that processes get that must end at once."""
SHUTDOWN_S = 600.0
"""Seconds that processes get to save and end, once they were asked to stop."""
CHUNK = 65536
PORTS = range(20000, 30000)
"""Below the ports that the kernel hands out by itself (32768 and up)."""
_held: list[socket.socket] = []
_CONTROL = re.compile(rb"\x1b\[[0-9;?]*[A-Za-z]")
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_PR_SET_PDEATHSIG = 1
# Loaded here, not after a fork: only calls that cannot deadlock are made there.
_libc = ctypes.CDLL(None, use_errno=True)


@contextmanager
def stop_requests() -> Iterator[list[int]]:
    """The requests to stop (Ctrl-C, SIGTERM, a closed terminal) that come meanwhile: a list that grows."""
    asked: list[int] = []
    numbers = [number for number in STOP_SIGNALS
               if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN]  # nohup is respected
    before = {number: signal.signal(number, lambda number, frame: asked.append(number)) for number in numbers}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def end_with_parent(parent: int) -> None:
    """Let the kernel kill this process when the thread that started it ends, however it ends.

    parent: process id that the parent had, to notice if it is gone already.
    """
    if hasattr(_libc, "prctl"):  # Linux; elsewhere an orphan ends when its collectives or pipes break
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def kill_group(leader: int) -> None:
    """SIGKILL a process that was started in a session of its own, and what it started."""
    with suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)


def answer_of(command: Sequence[str], environment: Environment, timeout_s: float, told: str = ""
              ) -> tuple[int, str, str]:
    """A program's exit status, output and errors.

    One that hangs goes, with what it started: a site's wrapper would leave the real one behind.

    Raises:
        OSError: it cannot be started.
        subprocess.TimeoutExpired: it did not end in time.
    """
    with subprocess.Popen(command, env=environment, text=True, errors="replace", start_new_session=True,
                          stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as program:
        try:
            output, errors = program.communicate(told, timeout_s)
        finally:
            if program.poll() is None:
                kill_group(program.pid)
    return program.returncode, output, errors


def free_port() -> int:
    """A port that nobody listens on here, on the first node; another one for each start.

    It is held until the next is asked for, bound without listening: the ranks listen some seconds later only, and
    others may look for a port meanwhile.
    """
    while _held:
        _held.pop().close()
    for port in random.SystemRandom().sample(PORTS, 100):
        probe = socket.socket()
        _held.append(probe)
        try:
            probe.bind(("", port))
        except OSError:
            continue
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the rank does: it may bind beside this
        return port
    raise UserError(f"This node has no free port among {PORTS.start}-{PORTS.stop - 1} for the ranks to meet on.")


def tell(target: IO[str], text: str) -> None:
    """Print while there is somebody to read: a closed terminal or pipe ends no run, and the logs have the story."""
    with suppress(OSError):
        print(text, file=target, flush=True)


def pass_on(source: int, other_end: int, target: IO[str], log: IO[bytes]) -> None:
    """Take all that comes from a pipe or pseudo-terminal until those who have its other end have closed it: for a
    stream as it is, for the log in whole lines; of a line redrawn in place, the last drawing."""
    os.close(other_end)
    rest = b""
    with suppress(OSError, ValueError):  # how a pseudo-terminal says so; nobody waits for what comes
        while chunk := os.read(source, CHUNK):
            with suppress(OSError):  # as `tell`
                target.buffer.write(chunk)  # type: ignore[attr-defined]
                target.buffer.flush()  # type: ignore[attr-defined]
            *lines, rest = (rest + chunk).split(b"\n")
            log.writelines(_last_drawing(line) + b"\n" for line in lines)
            rest = rest[-CHUNK:]
    if text := _last_drawing(rest):
        log.write(text + b"\n")
    os.close(source)


def _last_drawing(line: bytes) -> bytes:
    return _CONTROL.sub(b"", line.rstrip(b"\r").rpartition(b"\r")[2])


def started(command: Sequence[str], environment: Environment, out: int | None, errors: int | IO[bytes],
            given: int = subprocess.DEVNULL, kind: type[Started] = subprocess.Popen) -> Started:  # type: ignore[assignment]
    """Start a process that ends with this one. given: its input.

    In a session of its own: a terminal's Ctrl-C does not reach it, but comes from here, once. No thread may run while
    this is called, so that the code between fork and exec is safe.
    """
    return kind(command, env=environment, stdin=given, stdout=out, stderr=errors, start_new_session=True,
                            preexec_fn=partial(_prepare, os.getpid()))


class Group:
    """Processes that end together.

    Args:
        running: those that were started, by rank.
        stage: what they are called while they are stopped; empty: nothing is said of it.
        asked: requests to stop, as they come. The first asks the processes to save and end, the second kills them.

    Attributes:
        failed: ranks that ended badly, with their exit statuses, the first that failed first.
        killed: whether they had to be killed, since they did not end when they were told to.
    """

    def __init__(self, running: Iterable[subprocess.Popen[bytes]], stage: str = "", asked: Sequence[int] = ()) -> None:
        self.stage, self.asked, self._running = stage, asked, dict(enumerate(running))
        self.failed: list[tuple[int, int]] = []
        self.killed = False
        self._until = math.inf

    def run(self, each: Each = lambda: True) -> int:
        """Wait until all have ended; the exit status of the first that failed (128 + n for signal n), or 0. Its end is
        that of the others.

        each: called all along; ends the processes by answering False.
        """
        heard = 0
        while self._running:
            time.sleep(POLL_S)
            ended = {rank: status for rank, process in self._running.items() if (status := process.poll()) is not None}
            for rank in sorted(ended, key=lambda rank: ended[rank] >= 0):  # what was killed made the others fail
                del self._running[rank]
                if status := ended[rank]:
                    self.failed.append((rank, status if status > 0 else 128 - status))
                    self.end_within(BROKEN_S)
            if len(self.asked) > heard:
                heard = len(self.asked)
                if self.stage:
                    tell(sys.stderr, f"\nkilling {self.stage}" if heard > 1 else
                         f"\nstopping {self.stage}: it saves what it can (once more to kill it)")
                self.end_within(0 if heard > 1 else SHUTDOWN_S)
            if not each():
                self.end_within(KILL_S)
            if time.monotonic() > self._until:
                self.killed = True
                for process in self._running.values():
                    kill_group(process.pid)
        return self.failed[0][1] if self.failed else 0

    def end_within(self, seconds: float) -> None:
        """Ask the processes to end, once within that time."""
        if time.monotonic() + seconds < self._until:
            self._until = time.monotonic() + seconds
            for process in self._running.values():  # not Ctrl-C's own signal, which Python answers with a traceback
                process.terminate()


class Processes(Group):
    """Processes of one command.

    Args:
        ranks: processes under torch.distributed, which meet here; 0: one process without.
        log: file for the output.
        shown: whether it is shown as well; where this process has a terminal, those of the command are given one.
    """

    def __init__(self, command: Sequence[str], environment: Environment, stage: str = "",
                 asked: Sequence[int] = (), ranks: int = 0, log: Path = Path(os.devnull), *,
                 shown: bool = False) -> None:
        if ranks:
            environment = {**environment, "MASTER_ADDR": "127.0.0.1", "DROVER_RANKS": str(ranks),
                           "MASTER_PORT": str(free_port()), SECRET: secrets.token_hex(32),
                           "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "GROUP_RANK": "0"}
        own = [{"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)] or [{}]
        self._log = open(log, "ab", buffering=0)  # noqa: SIM115 - closed by run()
        pipes = [_terminal_pair() if sys.stdout.isatty() else os.pipe(), os.pipe()] if shown else []
        out, errors = [write for _, write in pipes] or [self._log.fileno()] * 2
        super().__init__([started(command, {**environment, **more}, out, errors) for more in own], stage, asked)
        self._threads = [threading.Thread(target=pass_on, args=(*pipe, stream, self._log), daemon=True)
                         for stream, pipe in zip((sys.stdout, sys.stderr), pipes, strict=False)]
        for thread in self._threads:
            thread.start()

    def run(self, each: Each = lambda: True) -> int:
        """As of a group; all output has been passed on."""
        status = super().run(each)
        for thread in self._threads:
            thread.join(1)  # what they left in the pipes; a lingering grandchild cannot hold us
        self._log.close()
        return status


def _prepare(parent: int) -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGUSR1, signal.SIGUSR2))  # until a stage says that it hears them
    end_with_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # a shell's background job would inherit that it is ignored


def _terminal_pair() -> tuple[int, int]:
    """A pseudo-terminal as wide as ours, so that the stage draws its live line; it changes no byte."""
    read, write = os.openpty()
    tty.setraw(write)
    with suppress(OSError):  # a terminal without a size: the stage takes its default
        size = fcntl.ioctl(sys.stdout.fileno(), termios.TIOCGWINSZ, b"\0" * 8)
        fcntl.ioctl(write, termios.TIOCSWINSZ, size)
    return read, write
