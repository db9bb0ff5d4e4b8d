"""Compare the content of inputs with their recorded hashes, in a background thread."""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Iterable
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
PAUSE_S = 1.0
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


def external(record: Record, stage: str) -> Expected:
    """A file from outside of the run, by the record that was made of it when `stage` started."""
    return Expected(Path(record["path"]), record["sha256"], f"has changed since the stage {stage} started",
                    f"Restore the old file, or run --stage {stage} --force to use the new one")


def wrong(file: Expected, digest: str) -> str:
    """The error message of a file with another hash."""
    return (f"{file.path} {file.origin}: sha256 {file.sha256[:12]} -> {digest[:12]}. {file.fix}; then the same command "
            f"continues.")


def refuse_longer(file: Expected) -> None:
    """UserError if the file is there with more bytes than expected, so that nothing endless is hashed."""
    result = file.path.stat().st_size
    if file.size is not None and result > file.size:
        raise UserError(f"{file.path} {file.origin}: {file.size:,} -> {result:,} bytes. {file.fix}; then the same "
                        f"command continues.")


def refuse_changed(file: Expected) -> None:
    """UserError if the file exists with other content. If it is missing, the code that reads it reports this."""
    with suppress(FileNotFoundError):
        refuse_longer(file)
        if (result := sha256_file(file.path)) != file.sha256:
            raise UserError(wrong(file, result))


class InputCheck:
    """Hashes files in a thread of the lowest priority, until all are done or one is wrong. The thread starts at once.

    The page cache needs no care: the kernel drops pages that were read once before others.

    Attributes:
        problem: the error message of the first file that is not as expected.
    """

    def __init__(self, files: Iterable[Expected]) -> None:
        self.problem = ""
        self._over = threading.Event()
        # A thread of the lowest priority that only waits could keep a killed process, and with it the stage's lock,
        # alive on a busy machine.
        self._worker = BackgroundWorker[Expected]("input-check", self._compare, stays=False)
        self.add(files)

    def add(self, files: Iterable[Expected]) -> None:
        """Hash these too."""
        for file in files:
            self._worker.put(file)

    def wait(self) -> None:
        """Wait until all files are done or one is wrong."""
        self._worker.wait()

    def refuse(self) -> None:
        """Wait for the end; UserError if a file is not as expected."""
        self.wait()
        if self.problem:
            raise UserError(self.problem)

    def close(self) -> None:
        """End the thread without reading the rest. A read that hangs is abandoned."""
        self._over.set()
        self._worker.close(LEFT_AFTER_S, drop=True)

    def _compare(self, file: Expected) -> None:
        with suppress(OSError, AttributeError):  # only on systems such as Linux a thread has a priority
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
        for attempt in range(TRIES):
            if self.problem or self._over.is_set():
                return
            problem = _problem(file, self._over)
            if not problem:
                return
            if attempt + 1 < TRIES:
                self._over.wait(PAUSE_S)
        self.problem = problem


def _problem(file: Expected, over: threading.Event) -> str:
    """The error message of a file that is not as expected; "" if it is, or if it was not read to its end."""
    try:
        digest = _hash(file.path, over)
    except OSError as error:
        return f"{file.path} cannot be read: {error.strerror}. {file.fix}; then the same command continues."
    except Exception as error:  # noqa: BLE001 - if the thread died silently, the file would count as correct
        return f"{file.path} could not be compared with its recorded hash: {type(error).__name__}: {error}."
    return "" if digest in (file.sha256, None) else wrong(file, str(digest))


def _hash(path: Path, over: threading.Event) -> str | None:
    """Hex sha256 of a file; None if `over` is set before the end."""
    digest, buffer = hashlib.sha256(), memoryview(bytearray(CHUNK_BYTES))
    with opened(path, 0) as file:
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
            if over.is_set():
                return None
    return digest.hexdigest()
