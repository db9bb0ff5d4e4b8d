"""Processes that must not outlive the one that started them."""

from __future__ import annotations

import ctypes
import os
import signal
from pathlib import Path
from types import FrameType, TracebackType

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_PR_SET_PDEATHSIG = 1
# Loaded here, not after a fork: only calls that cannot deadlock are made there.
_libc = ctypes.CDLL(None, use_errno=True)


class Interruptions:
    """Counts requests to stop (Ctrl-C, SIGTERM, a closed terminal) while the launcher, or a job's runner, works."""

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


def end_with_parent(signal_number: int, parent: int | None = None) -> None:
    """Let the kernel send this process a signal when the thread that started it ends, however it ends.

    Args:
        signal_number: SIGTERM for a process that winds up its own children, else SIGKILL.
        parent: process id that the parent had, to notice if it is gone already.
    """
    if hasattr(_libc, "prctl"):  # Linux; elsewhere an orphan ends when its collectives or pipes break
        _libc.prctl(_PR_SET_PDEATHSIG, signal_number)
    if parent is not None and os.getppid() != parent:
        os._exit(1)


def kill_tree(root: int) -> None:
    """SIGKILL `root` and everything below it. What is below may be in sessions of its own, so a signal to the process
    group would miss it."""
    for process in (root, *descendants(root)):
        try:
            os.kill(process, signal.SIGKILL)
        except ProcessLookupError:
            continue


def descendants(root: int) -> list[int]:
    """Process ids below `root`, parents before children (empty where there is no /proc)."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            # The name in parentheses may hold anything; the parent's id is the second field after it.
            fields = entry.read_text(errors="replace").rpartition(")")[2].split()
        except OSError:
            continue  # ended meanwhile
        children.setdefault(int(fields[1]), []).append(int(entry.parent.name))
    found, frontier = [], [root]
    while frontier:
        below = children.get(frontier.pop(), [])
        found += below
        frontier += below
    return found
