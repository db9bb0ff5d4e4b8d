"""Locks of stages. A lock is a file in the run folder, and the system releases it when its process ends.

They are in `.locks/`, not in the stages' own folders, because `--force` moves those away.

Several processes, also on several machines, may share the tasks of a pass, by claims. A claim is a file that names the
process that does a task. Each process changes the content of a file of its own every HEARTBEAT_S seconds. If it has not
changed for SILENT_S by the clock of a process that waits, its claims are void. The same holds if the process was on the
same machine and no longer exists. A process that was only slow may do its task nevertheless; this makes the same bytes
again.
"""

from __future__ import annotations

import errno
import os
import platform
import re
import secrets
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from functools import cache
from itertools import count
from pathlib import Path
from types import MappingProxyType
from typing import IO

from drover.pipeline.contract.state import this_job
from drover.pipeline.core.console import say
from drover.pipeline.core.errors import UserError
from drover.pipeline.core.files import lock_file

LOCKS = ".locks"
EARLIER_S = 180.0
"""How long to wait for an earlier start of the same submission that holds a stage: it may be on a node that Slurm has
given up, or its file system may notice late that its process has ended."""


def lock_to_share(folder: Path, stage: str) -> tuple[IO[str], bool]:
    """Lock a stage for one of the processes that share its tasks. Returns the open file, and whether no other process
    works on the stage or reads it; then none can start to, until `share`."""
    file = _open(folder, stage)
    alone = False
    with suppress(BlockingIOError):
        _locked(file, folder)
        alone = True
    return _take(file, folder, stage, shared=not alone), alone


def share(file: IO[str], folder: Path, stage: str) -> None:
    """Let others that share the stage work, too."""
    _take(file, folder, stage, shared=True)


@contextmanager
def turn(folder: Path, stage: str) -> Iterator[None]:
    """Let one of the processes that share a stage start or commit it at a time; the others wait."""
    with _open(folder, f"{stage}.turn") as file:
        try:
            _locked(file, folder)
        except BlockingIOError:
            say(stage, f"waits while {lock_holder(file)} starts or commits it")
            _locked(file, folder, wait=True)
        _take(file, folder, stage, shared=False)
        yield


def lock(folder: Path, name: str, what: str = "", *, shared: bool = False) -> IO[str]:
    """Lock a stage of the run in `folder` until the file is closed or this process ends.

    Args:
        what: what is locked, in words, if it is not the stage of this name.
        shared: for reading the stage. Several processes may read it at once, and none rebuilds it meanwhile.

    Returns:
        The open file. It locks nothing if the file system has no locks (a warning is printed), or if a reader may not
        write there.

    Raises:
        UserError: another process works on the stage (or reads it, for a writer), or a writer may not write there.
    """
    try:
        file = _open(folder, name)
    except OSError as error:
        if shared and (isinstance(error, PermissionError) or error.errno == errno.EROFS):
            return open(os.devnull, encoding="utf-8")
        if isinstance(error, PermissionError):
            raise UserError(f"You may not write into {folder}. Its owner can do that.") from None
        raise
    return _take(file, folder, name, what, shared=shared)


def _open(folder: Path, name: str) -> IO[str]:
    path = folder / LOCKS / name
    path.parent.mkdir(parents=True, exist_ok=True)
    return open(path, "a+", encoding="utf-8")


def _take(file: IO[str], folder: Path, name: str, what: str = "", *, shared: bool) -> IO[str]:
    """Lock an open file, or change its lock to the other kind."""
    if file.name == os.devnull:
        return file
    until = time.monotonic() + EARLIER_S
    waited = False
    looks = 0
    while True:
        try:
            _locked(file, folder, shared=shared)
            break
        except BlockingIOError:
            holder = lock_holder(file)
            going = _is_earlier_start(holder) or _is_ending(holder)
            looks = looks + 1
            # At the first attempt, the holder may have been killed a moment ago and not look like it yet.
            if (looks > 1 and not going) or time.monotonic() > until:
                file.close()
                raise in_use(folder, name, holder, what) from None
            if going and not waited:
                say(name, f"waits for the end of {holder}")
            waited = waited or going
            time.sleep(0.5)
    now = datetime.now(UTC).isoformat(timespec="seconds")
    file.truncate(0)
    job = _named("Slurm job", os.environ.get("SLURM_JOB_ID"))
    file.write(f"process {os.getpid()} on {platform.node()}{job}{_named('chain', this_job().chain)}, since {now}\n")
    file.flush()
    return file


def in_use(folder: Path, stage: str, holder: str, what: str = "") -> UserError:
    """The error for a process that has to be alone."""
    return UserError(f"{what or f'The stage {stage}'} of {folder} is in use by {holder}. Wait for it, or stop it "
                     f"first; or use name=<another> for a run of its own.")


def _is_ending(holder: str) -> bool:
    """Whether the holder of a lock is a process of this machine that is ending. On a busy machine, threads of a killed
    process may need seconds to end, and the last of them releases the lock."""
    match = re.match(r"process (\d+) on (\S+?)(,|\s|$)", holder)
    return match is not None and match[2] == platform.node() and has_ended(int(match[1]))


def has_ended(process: int) -> bool:
    """Whether a process of this machine is ending or does not exist."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return Path("/proc/self").exists()  # on systems without /proc, nothing is known about it


def _is_earlier_start(holder: str) -> bool:
    """Whether the holder of a lock is an earlier start of the same submission (not of another launcher in the same
    allocation). Starts of a submission follow each other, so it is about to end."""
    chain = _named("chain", this_job().chain)
    return bool(chain) and f"{chain}," in holder


def _named(what: str, value: str | None) -> str:
    """The job or submission in the description of a lock's holder; empty without one."""
    return f", {what} {value}" if value else ""


def _locked(file: IO[str], folder: Path, *, shared: bool = False, wait: bool = False) -> None:
    """`lock_file`, with a warning if the file system has no locks."""
    if not lock_file(file.fileno(), shared=shared, wait=wait):
        _warn(folder)


@cache
def _warn(folder: Path) -> None:
    say("run", f"warning: {folder} is on a file system without locks; do not run a stage twice at the same time")


def lock_holder(file: IO[str]) -> str:
    """The process that holds a lock, in words."""
    file.seek(0)
    return file.read().strip() or "another process"


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

    def take(self, key: str, void: Mapping[str, str] = MappingProxyType({})) -> bool:
        """Claim a task. False if another process has claimed it, unless its claim is among the `void` ones."""
        path = self.folder / key
        if key in void and _content(path) == void[key]:  # else another process has it by now
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

    def void(self, keys: Iterable[str]) -> dict[str, str]:
        """Those of these tasks whose claims are void, with their former owners."""
        owners = {key: _content(self.folder / key) for key in keys}
        dead = {owner for owner in {*owners.values()} - {self.owner} if self._is_dead(owner)}
        return {key: owner for key, owner in owners.items() if owner in dead}

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
