"""Inputs compared with what was committed of them: by their content, in a thread beside the work that reads them."""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drover.pipeline.core.background import BackgroundWorker
from drover.pipeline.core.errors import UserError
from drover.pipeline.core.files import sha256_file

CHUNK_BYTES = 1 << 22
"""Read and hashed at once; all the memory that is taken."""
TRIES = 2
"""A file is read so often before it is said to be damaged: a disk or network may fail once."""
LEFT_AFTER_S = 60.0
"""How long the end of a stage waits for a read that does not come back."""


@dataclass(frozen=True)
class Expected:
    """A file and what it should hold. origin: what is told of it after its path, and what mends it."""

    path: Path
    sha256: str
    origin: str
    mend: str


def committed(folder: Path, records: Sequence[Mapping[str, Any]], stage: str) -> list[Expected]:
    """Outputs of `stage`, by their records in its manifest."""
    origin = f"is not what the stage {stage} committed"
    mend = f"Put the right file back, or delete it and run --stage {stage} again, which makes what is missing"
    return [Expected(folder / record["path"], record["sha256"], origin, mend) for record in records]


def outside(records: Sequence[Mapping[str, Any]], stage: str) -> list[Expected]:
    """Files from outside of the run, by the records that were made of them when `stage` began."""
    return [Expected(Path(record["path"]), record["sha256"], f"has other content than when the stage {stage} began",
                     f"Put back what was there, or run --stage {stage} --force to take what is there now")
            for record in records]


def wrong(file: Expected, found: str) -> str:
    """What is told of a file with another hash."""
    return (f"{file.path} {file.origin}: sha256 {file.sha256[:12]} -> {found[:12]}. {file.mend}; then the same command "
            f"goes on.")


def refuse_changed(file: Expected) -> None:
    """UserError if the file is there and holds something else; whoever reads it tells that it is not there."""
    with suppress(FileNotFoundError):
        if (found := sha256_file(file.path)) != file.sha256:
            raise UserError(wrong(file, found))


class Pace:
    """How fast a thread reads: it rests after each second of work, unless somebody waits for it.

    Args:
        rest: seconds of rest for each of work.

    Attributes:
        hurry: set while somebody waits. over: set when it is to end.
    """

    def __init__(self, rest: float = 0.0) -> None:
        self.rest, self.hurry, self.over = rest, threading.Event(), threading.Event()

    def __call__(self, worked: float) -> bool:
        """Rest after so many seconds of work; whether to go on."""
        if self.rest:
            self.hurry.wait(worked * self.rest)
        return not self.over.is_set()


def lowest_priority() -> None:
    """Give this thread the lowest; a thread has its own on Linux, not everywhere."""
    with suppress(OSError, AttributeError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)


def compared(file: Expected, pace: Pace) -> str:
    """What is told of a file that is not what it should be, after it was read several times; "" if it is, or if `pace`
    says that it is over."""
    for attempt in range(TRIES):
        if not (found := _problem(file, pace)) or pace.over.is_set():
            return ""
        if attempt + 1 < TRIES:
            pace.hurry.wait(1.0)
    return found


class InputCheck:
    """Hashes files in a thread of the lowest priority, from the start on, until all are done or one is wrong.

    The page cache is left as it is: what was read once is the first that the kernel drops.

    Attributes:
        problem: what is told of the first file that is not as it should be.
    """

    def __init__(self, files: Sequence[Expected]) -> None:
        self.problem, self._pace = "", Pace()
        self._worker = BackgroundWorker[Expected]("input-check", self._compare)
        for file in files:
            self._worker.put(file)
        self._worker.close(0.0)  # no others come: the thread ends with them

    def wait(self) -> None:
        """Until all are done or one is wrong."""
        self._pace.hurry.set()
        self._worker.wait()

    def refuse(self) -> None:
        """Wait for the end; UserError if a file is not what it should be."""
        self.wait()
        if self.problem:
            raise UserError(self.problem)

    def close(self) -> None:
        """Leave the rest unread, and a read that a disk keeps from ending to itself."""
        self._pace.over.set()
        self._pace.hurry.set()
        self._worker.close(LEFT_AFTER_S, drop=True)

    def _compare(self, file: Expected) -> None:
        lowest_priority()
        self.problem = self.problem or compared(file, self._pace)


def _problem(file: Expected, pace: Pace) -> str:
    try:
        found = _hash(file.path, pace)
    except OSError as error:
        return f"{file.path} cannot be read: {error.strerror}. {file.mend}; then the same command goes on."
    except Exception as error:  # noqa: BLE001 - a thread that dies in silence would have found nothing wrong
        return f"{file.path} could not be compared with what was committed: {type(error).__name__}: {error}."
    return "" if found in (file.sha256, None) else wrong(file, str(found))


def _hash(path: Path, pace: Pace) -> str | None:
    """Hex sha256 of a file; None where it is over before."""
    digest, buffer = hashlib.sha256(), memoryview(bytearray(CHUNK_BYTES))
    with open(path, "rb", buffering=0) as file:
        began = time.monotonic()
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
            if not pace(time.monotonic() - began):
                return None
            began = time.monotonic()
    return digest.hexdigest()
