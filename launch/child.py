"""One stage's process: its output on the terminal and in a log, signals forwarded, no end without its end."""

from __future__ import annotations

import fcntl
import os
import re
import selectors
import shlex
import signal
import subprocess
import sys
import termios
import time
import tty
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from functools import partial
from pathlib import Path
from types import FrameType, TracebackType
from typing import IO

from launch.processes import end_with_parent, kill_tree

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
CHUNK = 65536
_CONTROL = re.compile(rb"\x1b\[[0-9;?]*[A-Za-z]")


class Interruptions:
    """Counts requests to stop (Ctrl-C, SIGTERM, a closed terminal) while the launcher works."""

    def __init__(self) -> None:
        self.count = 0
        self._before: dict[int, object] = {}

    def __enter__(self) -> Interruptions:
        for number in STOP_SIGNALS:
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:  # nohup is respected
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)  # type: ignore[arg-type]

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.count += 1


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


class Child:
    """A running stage.

    stop: sent at the first request to stop. `patience_s` later SIGTERM follows; at a second request, SIGKILL.
    orphaned: what the kernel sends the stage should the launcher itself be killed.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], log: Path, *,
                 stop: signal.Signals, orphaned: signal.Signals, patience_s: float) -> None:
        self.stop, self.patience_s = stop, patience_s
        log.parent.mkdir(parents=True, exist_ok=True)
        self._log = open(log, "ab", buffering=0)  # noqa: SIM115 - closed by run()
        self._log.write(f"==== {datetime.now().astimezone():%Y-%m-%d %H:%M:%S %z} {shlex.join(command)}\n".encode())
        self._terminal = sys.stdout.isatty()
        read, write = _terminal_pair() if self._terminal else os.pipe()
        # The launcher has one thread, so code between fork and exec is safe. A session of its own keeps the
        # terminal's Ctrl-C from the stage: it comes from here, once.
        self._process = subprocess.Popen(command, env=dict(environment), stdin=subprocess.DEVNULL, stdout=write,
                                         stderr=subprocess.PIPE, start_new_session=True,
                                         preexec_fn=partial(_prepare, orphaned, os.getpid()))
        os.close(write)
        assert self._process.stderr is not None
        self._streams = {read: (sys.stdout, Lines(self._log)),
                         self._process.stderr.fileno(): (sys.stderr, Lines(self._log))}
        self._stdout = read

    def run(self, interruptions: Interruptions, stage: str) -> int:
        """Show the output until the stage has ended; its exit status, 128 + n for signal n."""
        seen, asked_at = 0, 0.0
        with selectors.DefaultSelector() as selector:
            for stream in self._streams:
                selector.register(stream, selectors.EVENT_READ)
            while self._process.poll() is None:
                self._show(selector, 0.2)
                if interruptions.count > seen:
                    seen, asked_at = interruptions.count, asked_at or time.monotonic()
                    self._ask_to_stop(stage, seen)
                if asked_at and time.monotonic() - asked_at > self.patience_s:
                    asked_at = float("inf")
                    self._process.terminate()
            while self._show(selector, 0.2):  # what it left in the pipes; a lingering grandchild cannot hold us
                pass
        for _, lines in self._streams.values():
            lines.close()
        os.close(self._stdout)
        self._process.stderr.close()  # type: ignore[union-attr]
        self._log.close()
        status = self._process.returncode
        return status if status >= 0 else 128 - status

    def _ask_to_stop(self, stage: str, count: int) -> None:
        if count > 1:
            _write(sys.stderr, f"\nkilling {stage}\n".encode())
            kill_tree(self._process.pid)
            return
        _write(sys.stderr, f"\nstopping {stage}: it saves what it can (once more to kill it)\n".encode())
        self._process.send_signal(self.stop)

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
        else:
            if not selector.get_map():
                time.sleep(0.05)
        return came


def _prepare(orphaned: signal.Signals, parent: int) -> None:
    end_with_parent(orphaned, parent)
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
    """To our own output while it exists: a closed terminal or pipe does not end a training run."""
    with suppress(OSError):
        target.flush()
        target.buffer.write(chunk)  # type: ignore[attr-defined]
        target.buffer.flush()  # type: ignore[attr-defined]
