"""Claims, by which several processes, also on several machines, share the tasks of a pass.

A claim is a file that names the process that does a task. Each process changes the content of a file of its own every
HEARTBEAT_S seconds. If it has not changed for SILENT_S by the clock of a process that waits, its claims are void. The
same holds if the process was on the same machine and no longer exists. A process that was only slow may do its task
nevertheless; this makes the same bytes again.
"""

from __future__ import annotations

import os
import platform
import secrets
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from itertools import count
from pathlib import Path

from drover.pipeline.contract.locks import has_ended

HEARTBEAT_S = 30.0
SILENT_S = 180.0
"""A process whose heartbeat has not changed for so long counts as dead. Network file systems remember for a shorter
time what a file's content was."""


class Heartbeats:
    """For how long the heartbeats of other processes have not changed, by the clock of this one: clocks of different
    machines are never compared."""

    def __init__(self) -> None:
        self._seen: dict[str, tuple[object, float]] = {}

    def silent_s(self, owner: str, heartbeat: object) -> float:
        """Seconds since this process first saw this heartbeat of an owner; 0 for a new one."""
        now = time.monotonic()
        if owner not in self._seen or self._seen[owner][0] != heartbeat:
            self._seen[owner] = heartbeat, now
        return now - self._seen[owner][1]


class Claims:
    """This process's claims on the tasks of a pass, in a folder that all processes of the stage share.

    held: the tasks that it has claimed and not finished, by their keys.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.owner = f"{platform.node()}-{os.getpid()}-{secrets.token_hex(4)}"
        self.held = set[str]()
        self._others = Heartbeats()
        self._ended = threading.Event()

    def __enter__(self) -> Claims:
        self.folder.mkdir(parents=True, exist_ok=True)
        self._write_heartbeat(0)
        threading.Thread(target=self._keep_writing, name="claims", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        for key in self.held:
            (self.folder / key).unlink(missing_ok=True)

    def take(self, key: str, void: Iterable[str] = ()) -> bool:
        """Claim a task. False if another process has claimed it, unless its claim is among the `void` ones."""
        path = self.folder / key
        if key in void:
            path.unlink(missing_ok=True)
        try:
            with open(path, "x") as file:
                file.write(self.owner)
        except FileExistsError:
            return False
        self.held.add(key)
        return True

    def count(self) -> int:
        """How many tasks are claimed, finished ones included."""
        return sum(not path.suffix for path in self.folder.iterdir())

    def void(self, keys: Iterable[str]) -> set[str]:
        """Those of these tasks whose claims are void."""
        owners = {key: _content(self.folder / key) for key in keys}
        dead = {owner for owner in {*owners.values()} - {self.owner} if self._is_dead(owner)}
        return {key for key, owner in owners.items() if owner in dead}

    def _is_dead(self, owner: str) -> bool:
        host, _, process = owner.rpartition("-")[0].rpartition("-")
        if host == platform.node() and has_ended(int(process)):
            return True
        return self._others.silent_s(owner, _content(self._path(owner))) >= SILENT_S

    def _path(self, owner: str) -> Path:
        return self.folder / f"{owner}.beat"

    def _keep_writing(self) -> None:
        for number in count(1):
            if self._ended.wait(HEARTBEAT_S):
                return
            with suppress(OSError):  # such as a full disk
                self._write_heartbeat(number)

    def _write_heartbeat(self, number: int) -> None:
        self._path(self.owner).write_text(str(number))


def _content(path: Path) -> str:
    """A file's content; "" if it cannot be read, or if its writer was killed before it wrote."""
    with suppress(OSError):
        return path.read_text()
    return ""
