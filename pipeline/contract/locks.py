"""Who may work on a stage: locks in the run folder that end with the process that holds them, however it ends.

They lie in `.locks/`, not inside the stages' own folders, which `--force` moves away.
"""

from __future__ import annotations

import os
import platform
import re
import time
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import IO

from drover.pipeline.contract.tasks import Part
from drover.pipeline.core.console import say
from drover.pipeline.core.errors import UserError
from drover.pipeline.core.files import lock_file

LOCKS = ".locks"
EARLIER_S = 180.0
"""How long an earlier start of the same submission may go on to hold a stage: on a node that Slurm has
given up, or where a file system notices late that its process has ended."""
NETWORK_S = 75.0
"""Longer than network file systems remember by default that a file was not there."""


class StageLock:
    """The right to work on one stage: for a whole run of it alone, for parts together with other parts.

    Starts follow each other: whoever creates this waits until nobody else is about to start. A part keeps others from
    starting until `begun`, so that what has to be done once is done by the first and found by the rest.
    """

    def __init__(self, folder: Path, stage: str, part: Part | None) -> None:
        """Take it; UserError if the stage is in use otherwise than by other parts."""
        self.folder, self.stage, self.part = folder, stage, part
        starting = _open(folder, f"{stage}.start")
        try:
            _locked(starting, folder)
        except BlockingIOError:
            say(stage, f"waits while {_holder(starting)} starts")
            _locked(starting, folder, wait=True)
        self._start = _take(starting, folder, stage, shared=False)
        self._own, self._share = lock(folder, stage, shared=part is not None), None
        if part is None:
            self._end_start()
        else:
            self._share = self._claim(part)

    def alone(self) -> None:
        """Have the stage for oneself, until `begun`; UserError if other parts are at work."""
        _take(self._own, self.folder, self.stage, shared=False)

    def begun(self) -> None:
        """Let other parts work as well."""
        if self.part is not None:
            _take(self._own, self.folder, self.stage, shared=True)
            self._end_start()

    def release(self) -> None:
        """Give it up."""
        for file in (self._start, self._own, self._share):
            if file is not None:
                file.close()

    def _end_start(self) -> None:
        if self._start is not None:
            self._start.close()

    def _claim(self, part: Part) -> IO[str] | None:
        """This part, once; and nobody may be at work who cut the units into another number of parts."""
        for path in sorted((self.folder / LOCKS).glob(f"{self.stage}.part-*-of-*")):
            if not path.name.endswith(f"-of-{part.count}"):
                other = lock(self.folder, path.name, f"{self.stage} (cut into another number of parts)")
                if other is not None:
                    other.close()
        return lock(self.folder, f"{self.stage}.part-{part.tag}", f"{self.stage} (part {part})")


def lock(folder: Path, name: str, what: str = "", *, shared: bool = False) -> IO[str] | None:
    """Hold a stage of the run in `folder` until this process ends, however it ends.

    `shared` is for reading the stage: several may read, but nobody rebuilds it meanwhile. None where the file system
    has no locks, which is said, or where a reader may not write. `what`: the stage in words, if `name` is not that.

    Raises:
        UserError: somebody else works on the stage (or reads it, for a writer).
    """
    try:
        file = _open(folder, name)
    except PermissionError:
        if shared:
            return None
        raise
    return _take(file, folder, what or name, shared=shared)


def _open(folder: Path, name: str) -> IO[str]:
    path = folder / LOCKS / name
    path.parent.mkdir(parents=True, exist_ok=True)
    return open(path, "a+", encoding="utf-8")


def _take(file: IO[str] | None, folder: Path, what: str, *, shared: bool) -> IO[str] | None:
    """Lock an open file, or change its lock to the other kind; None where there are no locks."""
    if file is None:
        return None
    until, waited, looks = time.monotonic() + EARLIER_S, False, 0
    while True:
        try:
            locked = _locked(file, folder, shared=shared)
            break
        except BlockingIOError:
            holder = _holder(file)
            going, looks = _is_earlier_start(holder) or _is_ending(holder), looks + 1
            # At the first look it may have been killed a moment ago, and not be seen to be on its end yet.
            if (looks > 1 and not going) or time.monotonic() > until:
                file.close()
                raise UserError(f"The stage {what} of {folder} is in use by {holder}. Wait for it, or stop it first; "
                                f"or use name=<another> for a run of its own.") from None
            if going and not waited:
                say(what, f"waits for the end of {holder}")
            waited = waited or going
            time.sleep(0.5)
    if not locked:
        return None
    now = datetime.now(UTC).isoformat(timespec="seconds")
    file.truncate(0)
    file.write(f"process {os.getpid()} on {platform.node()}{_job()}{_chain()}, since {now}\n")
    file.flush()
    return file


def _is_ending(holder: str) -> bool:
    """Whether a process of this machine that holds a lock is on its end: on a busy one, threads of a killed process may
    need seconds to go, and the lock goes with the last of them."""
    found = re.match(r"process (\d+) on (\S+?)(,|\s|$)", holder)
    if found is None or found[2] != platform.node():
        return False
    try:
        return Path(f"/proc/{found[1]}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return Path("/proc/self").exists()  # elsewhere nothing is known of it


def _is_earlier_start(holder: str) -> bool:
    """Whether a lock is held by a start of the submission that this process is of (not by another launcher in the same
    allocation): then it is about to be given up, for they
    start one after another."""
    return bool(_chain()) and f"{_chain()}," in holder


def _job() -> str:
    """How a holder of a lock tells its Slurm job; empty outside of one."""
    return f", Slurm job {os.environ['SLURM_JOB_ID']}" if os.environ.get("SLURM_JOB_ID") else ""


def _chain() -> str:
    """How a holder of a lock tells the submission that a launcher started it for."""
    return f", chain {os.environ['DROVER_CHAIN']}" if os.environ.get("DROVER_CHAIN") else ""


def _locked(file: IO[str], folder: Path, *, shared: bool = False, wait: bool = False) -> bool:
    """`lock_file`; where there are no locks, that is said."""
    locked = lock_file(file.fileno(), shared=shared, wait=wait)
    if not locked:
        _warn(folder)
    return locked


@cache
def _warn(folder: Path) -> None:
    say("run", f"warning: {folder} is on a file system without locks; do not run a stage, or the same part of one, "
               f"twice at once")


def _holder(file: IO[str]) -> str:
    file.seek(0)
    return file.read().strip() or "another process"
