"""A start on this box: one process per rank, on the terminal and in a log, signals passed on, no end without theirs."""

from __future__ import annotations

import fcntl
import math
import os
import platform
import re
import secrets
import selectors
import shlex
import signal
import subprocess
import sys
import termios
import time
import tty
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import IO

from launch.host import free_port
from launch.plan import Machine
from launch.processes import Interruptions, end_with_parent, kill_tree
from launch.slurm.job.srun import BROKEN_S, StepEnd

SHUTDOWN_S = 600.0
"""How long processes that were asked to stop may take to save and end."""
CHUNK = 65536
_CONTROL = re.compile(rb"\x1b\[[0-9;?]*[A-Za-z]")


def find_machine() -> Machine:
    """Cores that this process may use and GPUs that it can see, without importing torch."""
    return Machine(len(os.sched_getaffinity(0)), _gpus())


def rendezvous(ranks: int, number: int = 0) -> dict[str, str]:
    """Variables that all ranks of start `number` share."""
    return {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port(os.getpid(), number)),
            "DROVER_RANKS": str(ranks), "DROVER_STORE_SECRET": secrets.token_hex(32),
            "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "GROUP_RANK": "0"}


class Lines:
    """Collects a stream into whole lines for the log; of a line redrawn in place, the last drawing."""

    def __init__(self, log: IO[bytes]) -> None:
        self.log, self.rest = log, b""

    def feed(self, chunk: bytes) -> None:
        """Take what came; write the lines that are complete."""
        *lines, self.rest = (self.rest + chunk).split(b"\n")
        self.log.writelines(self._clean(line) + b"\n" for line in lines)
        self.rest = self.rest[-CHUNK:]

    def close(self) -> None:
        """Write what had no line end."""
        if text := self._clean(self.rest):
            self.log.write(text + b"\n")
        self.rest = b""

    @staticmethod
    def _clean(line: bytes) -> bytes:
        return _CONTROL.sub(b"", line.rstrip(b"\r").rpartition(b"\r")[2])


class Processes:
    """One start of a stage.

    Args:
        ranks: processes, each with its RANK and LOCAL_RANK; 0: one process without.
        stage: what it is called while it is stopped.
        each: called all along; ends the processes by answering False.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], ranks: int, log: Path, stage: str,
                 interruptions: Interruptions, each: Callable[[], bool] = lambda: True) -> None:
        self.stage, self.interruptions, self.ranks, self.each = stage, interruptions, ranks, each
        log.parent.mkdir(parents=True, exist_ok=True)
        self._log = open(log, "ab", buffering=0)  # noqa: SIM115 - closed by run()
        self._log.write(f"==== {datetime.now().astimezone():%Y-%m-%d %H:%M:%S %z} {shlex.join(command)}\n".encode())
        out = _terminal_pair() if sys.stdout.isatty() else os.pipe()
        errors = os.pipe()
        own = [{"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)] or [{}]
        # The launcher has one thread, so code between fork and exec is safe. Sessions of their own keep the terminal's
        # Ctrl-C from the processes: it comes from here, once.
        self._running = dict(enumerate(subprocess.Popen(
            command, env={**environment, **more}, stdin=subprocess.DEVNULL, stdout=out[1], stderr=errors[1],
            start_new_session=True, preexec_fn=partial(_prepare, os.getpid())) for more in own))
        os.close(out[1])
        os.close(errors[1])
        self._streams = {out[0]: (sys.stdout, Lines(self._log)), errors[0]: (sys.stderr, Lines(self._log))}
        self._failed: list[tuple[int, int]] = []
        self._until = math.inf

    def run(self) -> StepEnd:
        """Show the output until all have ended. The first that fails takes the others along; the status is its."""
        asked = 0
        with selectors.DefaultSelector() as selector:
            for stream in self._streams:
                selector.register(stream, selectors.EVENT_READ)
            while self._running:
                self._show(selector, 0.1)
                if self.interruptions.count > asked:
                    asked = self.interruptions.count
                    self._ask_to_stop(asked)
                self._look()
                if time.monotonic() > self._until or not self.each():
                    self._kill()
            while self._show(selector, 0.2):  # what they left in the pipes; a lingering grandchild cannot hold us
                pass
        for stream, (_, lines) in self._streams.items():
            lines.close()
            os.close(stream)
        self._log.close()
        # Where one fails others end because of it, by the launcher's SIGTERM for one.
        self._failed.sort(key=lambda end: end[1] == 128 + signal.SIGTERM)
        said = "".join(f"{platform.node()}: task {rank}: {_how(status)}\n" for rank, status in self._failed)
        return StepEnd(self._failed[0][1] if self._failed else 0, said if self.ranks else "")

    def _look(self) -> None:
        """Note who has ended; at the first failure tell the others to end."""
        ended = {rank: status for rank, process in self._running.items() if (status := process.poll()) is not None}
        for rank, status in sorted(ended.items(), key=lambda end: end[1] >= 0):  # what was killed made the others fail
            del self._running[rank]
            if status:
                self._failed.append((rank, status if status > 0 else 128 - status))
        if any(ended.values()):
            self._end_within(BROKEN_S)

    def _ask_to_stop(self, count: int) -> None:
        if count > 1:
            _write(sys.stderr, f"\nkilling {self.stage}\n".encode())
            self._kill()
            return
        # SIGTERM, not Ctrl-C's own signal: Python would answer that with a traceback from wherever it is.
        _write(sys.stderr, f"\nstopping {self.stage}: it saves what it can (once more to kill it)\n".encode())
        self._end_within(SHUTDOWN_S)

    def _end_within(self, seconds: float) -> None:
        self._until = min(self._until, time.monotonic() + seconds)
        for process in self._running.values():
            process.terminate()

    def _kill(self) -> None:
        for process in self._running.values():
            kill_tree(process.pid)

    def _show(self, selector: selectors.BaseSelector, wait_s: float) -> bool:
        """Pass on what has come; whether anything has."""
        came = False
        for key, _ in selector.select(wait_s) if selector.get_map() else ():
            try:
                chunk = os.read(key.fd, CHUNK)
            except OSError:  # how a pseudo-terminal says that its other end is closed
                chunk = b""
            if not chunk:
                selector.unregister(key.fd)
                continue
            came = True
            target, lines = self._streams[key.fd]
            _write(target, chunk)
            lines.feed(chunk)
        if not selector.get_map():
            time.sleep(0.05)
        return came


def tell(stream: IO[str], text: str) -> None:
    """Print while there is somebody to read: a closed terminal or pipe ends no run, and the logs have the story."""
    _write(stream, f"{text}\n".encode())


def _gpus() -> int:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    try:
        listing = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=20, check=True).stdout
        present = sum(line.startswith("GPU ") for line in listing.splitlines())
    except (OSError, subprocess.SubprocessError):
        present = sum(path.name[6:].isdigit() for path in Path("/dev").glob("nvidia*"))
    if visible is None:
        return present
    return min(present, len([name for name in visible.split(",") if name.strip() not in ("", "-1")]))


def _how(status: int) -> str:
    """As srun has it."""
    return signal.strsignal(status - 128) or "Killed" if status > 128 else f"Exited with exit code {status}"


def _prepare(parent: int) -> None:
    end_with_parent(signal.SIGKILL, parent)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # a shell's background job would inherit that it is ignored


def _terminal_pair() -> tuple[int, int]:
    """A pseudo-terminal as wide as ours, so that the stage draws its live line; it changes no byte."""
    read, write = os.openpty()
    tty.setraw(write)
    with suppress(OSError):  # a terminal without a size: the stage takes its default
        size = fcntl.ioctl(sys.stdout.fileno(), termios.TIOCGWINSZ, b"\0" * 8)
        fcntl.ioctl(write, termios.TIOCSWINSZ, size)
    return read, write


def _write(target: IO[str], chunk: bytes) -> None:
    with suppress(OSError):
        target.flush()
        target.buffer.write(chunk)  # type: ignore[attr-defined]
        target.buffer.flush()  # type: ignore[attr-defined]
