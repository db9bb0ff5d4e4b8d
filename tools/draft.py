"""A folder that appears whole or not at all, and whose making continues where it was interrupted."""

from __future__ import annotations

import os
import shutil
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from drover.pipeline.contract.tasks import Ledger
from drover.pipeline.core.errors import UserError
from drover.pipeline.core.files import lock_file, publish, read_json, remove_temporary, sha256_json, write_json

_WORK = ".work"
"""Folder inside the draft: plan.json, what the folder is made of, and the ledger of finished parts."""


class Draft:
    """The folder `OUT.partial` beside OUT, in the hands of this process alone until it is closed. Use it in a `with`.

    Args:
        out: where the folder is to appear.
        manifest: name of the file in it that describes it.
        made_of: what decides its content, as JSON; it stands in the manifest.

    Attributes:
        folder: where to write.
        complete: whether the folder of this content is there already, under its final name.
        done: the records of finished parts, by name.

    Raises:
        UserError: something else is at `out` or in the draft, or another process is at work on it.
    """

    def __init__(self, out: Path, manifest: str, made_of: dict[str, Any]) -> None:
        self.out, self.manifest, self.made_of = out, manifest, made_of
        self.done: dict[str, Any] = {}
        self._lock: int | None = None
        self.complete = self._is_made()
        if self.complete:
            shutil.rmtree(out / _WORK, ignore_errors=True)  # of a process that was killed before its last step
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
                print(f"\n{self.folder} keeps what is finished; the same command continues.", file=sys.stderr)

    def add(self, name: str, record: Any) -> None:
        """Note that a part is finished."""
        self._ledger.add(name, self._key, record)
        self.done[name] = record

    def describe(self, content: dict[str, Any]) -> None:
        """Write the manifest."""
        write_json(self.folder / self.manifest, {**content, "made_of": self.made_of})

    def publish(self) -> None:
        """Put the folder at its place. UserError if something has appeared there meanwhile."""
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
        return UserError(f"There is something else at {self.out} already, and it is left as it is. Give another "
                         f"folder, or remove it first.")

    def _take(self) -> int:
        """Make the folder if it is not there, and lock it until this process ends."""
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
        """Take over what is finished of the same; UserError for the beginning of something else."""
        plan, new = self.folder / _WORK / "plan.json", self.made_of
        if not plan.is_file():
            if strangers := [path.name for path in self.folder.iterdir() if path.name != _WORK]:
                raise UserError(f"{self.folder} is in the way: it has {strangers[0]!r} and is not the beginning of "
                                f"this. Remove it, or give another folder.")
            write_json(plan, new)
        old = read_json(plan)
        if differing := [f"{key} was {_short(old.get(key))} and is {_short(new.get(key))}"
                         for key in sorted({*old, *new}) if old.get(key) != new.get(key)]:
            raise UserError(f"{self.folder} is the beginning of something else: {'; '.join(differing)}. Remove it to "
                            f"start anew, or give the command that started it.")
        remove_temporary(self.folder)
        self.done = self._ledger.of_key(self._key)


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 120 else f"{text[:117]}..."
