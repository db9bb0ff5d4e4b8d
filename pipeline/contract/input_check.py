"""Compare the content of inputs with their recorded hashes, in a background thread."""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from drover.pipeline.core.background import BackgroundWorker
from drover.pipeline.core.errors import UserError
from drover.pipeline.core.files import Record, opened, sha256_file

CHUNK_BYTES = 1 << 22
"""Bytes that are read and hashed at once. The thread takes no other memory."""
TRIES = 2
"""How often a file is read before it counts as damaged: a disk or network may fail once."""
LEFT_AFTER_S = 60.0
"""How long the end of a stage waits for a read that hangs."""


@dataclass(frozen=True)
class Expected:
    """A file and its expected hash. origin, fix: the sentences of an error that follow the path, and say what to do.
    size: in bytes, if it is known."""

    path: Path
    sha256: str
    origin: str
    fix: str
    size: int | None = None


def output(folder: Path, record: Record, stage: str) -> Expected:
    """An output of `stage`, by its record in its manifest."""
    return Expected(folder / record["path"], record["sha256"], f"is not what the stage {stage} committed",
                    f"Restore the right file, or delete it and run --stage {stage} again, which makes missing files",
                    record.get("bytes"))


def outside(record: Record, stage: str) -> Expected:
    """A file from outside of the run, by the record that was made of it when `stage` started."""
    return Expected(Path(record["path"]), record["sha256"], f"has changed since the stage {stage} started",
                    f"Restore the old file, or run --stage {stage} --force to use the new one")


def wrong(file: Expected, found: str) -> str:
    """The error message of a file with another hash."""
    return (f"{file.path} {file.origin}: sha256 {file.sha256[:12]} -> {found[:12]}. {file.fix}; then the same command "
            f"continues.")


def refuse_longer(file: Expected) -> None:
    """UserError if the file is there with more bytes than expected, so that nothing endless is hashed."""
    found = file.path.stat().st_size
    if file.size is not None and found > file.size:
        raise UserError(f"{file.path} {file.origin}: {file.size:,} -> {found:,} bytes. {file.fix}; then the same "
                        f"command continues.")


def refuse_changed(file: Expected) -> None:
    """UserError if the file exists with other content. If it is missing, the code that reads it reports this."""
    with suppress(FileNotFoundError):
        refuse_longer(file)
        if (found := sha256_file(file.path)) != file.sha256:
            raise UserError(wrong(file, found))


class Pace:
    """How fast a thread reads: it rests in proportion to its work, unless another thread waits for it.

    Args:
        rest: seconds of rest for each second of work.

    Attributes:
        hurry: set while another thread waits. over: set when the thread is to end.
    """

    def __init__(self, rest: float = 0.0) -> None:
        self.rest, self.hurry, self.over = rest, threading.Event(), threading.Event()

    def __call__(self, worked: float) -> bool:
        """Rest after so many seconds of work. Returns whether to continue."""
        if self.rest:
            self.hurry.wait(worked * self.rest)
        return not self.over.is_set()


def lowest_priority() -> None:
    """Give this thread the lowest priority, on systems such as Linux where a thread has one."""
    with suppress(OSError, AttributeError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)


def compared(file: Expected, pace: Pace) -> str:
    """The error message of a file that is not as expected, after several reads; "" if it is, or if `pace` is over."""
    for attempt in range(TRIES):
        if not (found := _problem(file, pace)) or pace.over.is_set():
            return ""
        if attempt + 1 < TRIES:
            pace.hurry.wait(1.0)
    return found


class InputCheck:
    """Hashes files in a thread of the lowest priority, until all are done or one is wrong. The thread starts at once.

    The page cache needs no care: the kernel drops pages that were read once before others.

    Attributes:
        problem: the error message of the first file that is not as expected.
    """

    def __init__(self, files: Sequence[Expected]) -> None:
        self.problem, self._pace = "", Pace()
        self._worker = BackgroundWorker[Expected]("input-check", self._compare)
        for file in files:
            self._worker.put(file)
        self._worker.close(0.0)  # no others come: the thread ends with them

    def wait(self) -> None:
        """Wait until all files are done or one is wrong."""
        self._pace.hurry.set()
        self._worker.wait()

    def refuse(self) -> None:
        """Wait for the end; UserError if a file is not as expected."""
        self.wait()
        if self.problem:
            raise UserError(self.problem)

    def close(self) -> None:
        """End the thread without reading the rest. A read that hangs is abandoned."""
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
        return f"{file.path} cannot be read: {error.strerror}. {file.fix}; then the same command continues."
    except Exception as error:  # noqa: BLE001 - if the thread died silently, the file would count as correct
        return f"{file.path} could not be compared with its recorded hash: {type(error).__name__}: {error}."
    return "" if found in (file.sha256, None) else wrong(file, str(found))


def _hash(path: Path, pace: Pace) -> str | None:
    """Hex sha256 of a file; None if `pace` is over before the end."""
    digest, buffer = hashlib.sha256(), memoryview(bytearray(CHUNK_BYTES))
    with opened(path, 0) as file:
        began = time.monotonic()
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
            if not pace(time.monotonic() - began):
                return None
            began = time.monotonic()
    return digest.hexdigest()
