"""A folder of weights that appears whole or not at all, and whose making continues where it was interrupted.

It is made as `<name>.partial`, file by file. Its record, `weights.json`, says what it is made of and which of its files
are finished, with their hashes; the last act is one rename.
"""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from model.config import ModelConfig
from pipeline.errors import UserError
from pipeline.files import output_record, sha256_file, sync, write_json
from pipeline.formats.record import FORMAT, RECORD, weights_record


class OutputFolder:
    """The making of one folder. Use it in a `with`, and end with `finish`.

    Args:
        target: where it is to appear.
        made_of: what decides its content, as JSON: beginnings of something else are not continued.
        model, token_ids: for the record.

    Raises UserError if something is at the target, if `.partial` is the beginning of something else, or if another
    process is at work on it.
    """

    def __init__(self, target: Path, made_of: dict[str, Any], model: ModelConfig, token_ids: dict[str, Any]) -> None:
        self.target = target
        self._refuse_existing()
        self.partial = target.with_name(f"{target.name}.partial")
        self._record: dict[str, Any] = {"format": FORMAT, "model": model.model_dump(mode="json"),
                                        "token_ids": token_ids, "made_of": made_of, "files": []}
        self._descriptor = self._take()
        try:
            self._continue()
        except BaseException:
            os.close(self._descriptor)
            raise

    def __enter__(self) -> OutputFolder:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        os.close(self._descriptor)

    def make(self, name: str, write: Callable[[Path], Any]) -> bool:
        """Have `write` write the file `name`, unless an earlier process finished it, as its hash proves.

        Returns whether it was written now. A kill leaves it unfinished, to be written again.
        """
        path = self.partial / name
        known = next((file for file in self._record["files"] if file["path"] == name), None)
        if known and path.is_file() and path.stat().st_size == known["bytes"] and sha256_file(path) == known["sha256"]:
            return False
        path.parent.mkdir(exist_ok=True)
        write(path)
        sync(path)
        others = [file for file in self._record["files"] if file["path"] != name]
        self._record["files"] = [*others, output_record(self.partial, path)]
        write_json(self.partial / RECORD, self._record)
        return True

    @property
    def size(self) -> int:
        """Bytes of all finished files."""
        return sum(file["bytes"] for file in self._record["files"])

    def finish(self) -> None:
        """Put the folder at its place. UserError if something has appeared there meanwhile."""
        for path in self.partial.rglob("*"):
            name = path.relative_to(self.partial).as_posix()
            if path.is_file() and name != RECORD and all(file["path"] != name for file in self._record["files"]):
                path.unlink()  # what a kill left of writing
        sync(self.partial)
        self._refuse_existing()
        self.partial.rename(self.target)
        sync(self.target.parent)

    def _refuse_existing(self) -> None:
        if os.path.lexists(self.target):
            raise UserError(f"There is something at {self.target} already, and it is left as it is. Give another "
                            f"--to, or remove it first.")

    def _take(self) -> int:
        """Make the folder if it is not there, and have it for oneself until this process ends."""
        try:
            self.partial.parent.mkdir(parents=True, exist_ok=True)
            with suppress(FileExistsError):
                self.partial.mkdir()
            descriptor = os.open(self.partial, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except OSError as error:
            raise UserError(f"{self.partial} cannot be made a folder ({error.strerror}). Give another --to, or remove "
                            f"what is in the way.") from None
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            raise UserError(f"Another process is writing {self.partial}. Wait for it, or stop it first.") from None
        except OSError as error:
            if error.errno not in (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP):  # a file system without locks
                raise
        return descriptor

    def _continue(self) -> None:
        """Take over what is finished of the same; UserError for the beginning of something else."""
        begun = weights_record(self.partial)
        strangers = [path.name for path in self.partial.iterdir() if not path.name.startswith(RECORD)]
        if begun is None and strangers:
            raise UserError(f"{self.partial} is in the way: it has {strangers[0]!r} and no {RECORD}, so it is not the "
                            f"beginning of this. Remove it, or give another --to.")
        if begun is None:
            write_json(self.partial / RECORD, self._record)
            return
        old, new = ({**made_of, "model": model} for made_of, model in (
            (begun["made_of"], begun["model"]), (self._record["made_of"], self._record["model"])))
        differing = [f"{key} was {_short(old.get(key))} and is {_short(new.get(key))}" for key in sorted({*old, *new})
                     if old.get(key) != new.get(key)]
        if differing:
            raise UserError(f"{self.partial} is the beginning of something else: {'; '.join(differing)}. Remove it to "
                            f"begin anew, or give the command that began it.")
        self._record["files"] = begun["files"]


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 120 else f"{text[:117]}..."
