"""An output folder that appears complete or not at all. An interrupted process continues where it stopped."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from drover.pipeline.core.console import echo
from drover.pipeline.core.errors import UserError
from drover.pipeline.core.files import (
    Ledger,
    Record,
    lock_file,
    output_record,
    publish,
    read_json,
    remove_temporary,
    sha256_json,
    sync,
    write_json,
)

_WORK = ".work"
"""Folder inside the draft: plan.json, which holds the inputs, and the ledger of finished files."""


class Draft:
    """The folder `OUT.partial` next to OUT, locked by this process until it is closed. Use it in a `with`.

    Args:
        out: the folder to make.
        manifest: name of the file in it that describes it.
        made_of: the inputs that decide its content, as JSON. The manifest records them.

    Attributes:
        folder: where to write.
        complete: whether `out` exists already with this content.
        done: the records of finished files, by name.

    Raises:
        UserError: something else is at `out` or in the draft, or another process is writing it.
    """

    def __init__(self, out: Path, manifest: str, made_of: Record) -> None:
        self.out, self.manifest, self.made_of = out, manifest, made_of
        self.done: dict[str, Any] = {}
        self._lock: int | None = None
        self.complete = self._is_made()
        if self.complete:
            shutil.rmtree(out / _WORK, ignore_errors=True)  # left by a process that was killed before its last step
            return
        self.folder = out.with_name(f"{out.name}.partial")
        self._ledger, self._key = Ledger(self.folder / _WORK), sha256_json(made_of)
        self._lock = self._take()
        try:
            self._continue()
        except BaseException:
            os.close(self._lock)
            raise

    def __enter__(self) -> Draft:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._lock is not None:
            os.close(self._lock)
            if kind is KeyboardInterrupt:
                echo(f"\n{self.folder} keeps what is finished; the same command continues.", file=sys.stderr)

    def make(self, name: str, write: Callable[[Path], object]) -> bool:
        """Write a file, unless its hash shows that an earlier process finished it. Returns whether it was written.

        write: gets the path; it may return the sha256 of the content, which is then compared with the file.
        """
        path = self.folder / name
        if path.is_file() and output_record(self.folder, path) == self.done.get(name):
            return False
        path.parent.mkdir(exist_ok=True)
        wanted = write(path)
        sync(path)
        record = output_record(self.folder, path)
        if isinstance(wanted, str) and wanted != record["sha256"]:
            raise UserError(f"{path} has other content than was written there. Check the disk, and run the command "
                            f"again.")
        self._ledger.add(name, self._key, record)
        self.done[name] = record
        return True

    def describe(self, content: Record) -> None:
        """Write the manifest."""
        write_json(self.folder / self.manifest, {**content, "made_of": self.made_of})

    def publish(self) -> None:
        """Rename the folder to `out`. UserError if something has appeared there meanwhile."""
        try:
            publish(self.folder, self.out)
        except OSError:
            raise self._in_the_way() from None
        shutil.rmtree(self.out / _WORK)

    def _is_made(self) -> bool:
        if not os.path.lexists(self.out) or (self.out.is_dir() and not any(self.out.iterdir())):
            return False
        with suppress(OSError, ValueError, TypeError, LookupError):
            if read_json(self.out / self.manifest)["made_of"] == self.made_of:
                return True
        raise self._in_the_way()

    def _in_the_way(self) -> UserError:
        return UserError(f"There is something else at {self.out} already. It is not overwritten: give another folder, "
                         f"or remove it first.")

    def _take(self) -> int:
        """Make the folder if it does not exist, and lock it until this process ends."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except OSError as error:
            raise UserError(f"{self.folder} cannot be made a folder ({error.strerror}). Give another folder, or remove "
                            f"what is in the way.") from None
        try:
            lock_file(descriptor)
        except BlockingIOError:
            os.close(descriptor)
            raise UserError(f"Another process is writing {self.folder}. Wait for it, or stop it first.") from None
        return descriptor

    def _continue(self) -> None:
        """Take over the finished files of an interrupted process. UserError if it was making something else."""
        plan, new = self.folder / _WORK / "plan.json", self.made_of
        if not plan.is_file():
            if strangers := [path.name for path in self.folder.iterdir() if path.name != _WORK]:
                raise UserError(f"{self.folder} is in the way: it has {strangers[0]!r} and was not started by this "
                                f"command. Remove it, or give another folder.")
            write_json(plan, new)
        old = read_json(plan)
        if old != new:
            differing = [key for key in sorted({*old, *new}) if old.get(key) != new.get(key)]
            raise UserError(f"{self.folder} was started with other inputs ({', '.join(differing)}). Remove it to start "
                            f"from scratch, or give the command that started it.")
        remove_temporary(self.folder)
        self.done = self._ledger.of_key(self._key)
