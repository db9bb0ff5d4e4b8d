"""An export's folder while it is made: it gets its name last, and an attempt that broke off is gone on with."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pipeline.errors import UserError
from pipeline.files import append_line, read_json, read_lines, sync, write_json
from tools.export_tokens.plan import Region

MANIFEST = "export.json"
WORK = ".work"
"""Folder inside the draft: what is exported, and a line for each part that is written."""
SUFFIX = ".unfinished"


class Draft:
    """The folder `OUT.unfinished` beside OUT, in the hands of this process alone until it is closed.

    Args:
        out: the folder that is to be.
        identity: what is exported.

    Attributes:
        folder: where to write.
        complete: whether the export of this identity is there already, under its final name.
        fresh: whether nothing was written before.

    Raises:
        UserError: something else is at `out`, or in the draft; another process is at work on it.
    """

    def __init__(self, out: Path, identity: dict[str, Any]) -> None:
        self.out, self.identity = out, identity
        self.folder = out.with_name(out.name + SUFFIX)
        self.complete = _is_export(out, identity)
        self._lock: int | None = None
        if self.complete:
            shutil.rmtree(out / WORK, ignore_errors=True)  # of an attempt that was killed after its last step but one
            return
        if self.folder.is_dir() and not (self.folder / WORK).is_dir() and any(self.folder.iterdir()):
            raise UserError(f"{self.folder} is there and is no unfinished export. Give another --out, or remove it.")
        try:
            (self.folder / WORK).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"{self.folder} cannot be made: {error.strerror}. Give another --out.") from None
        self._take()
        plan = self.folder / WORK / "plan.json"
        self.fresh = not plan.is_file()
        if not self.fresh and read_json(plan) != identity:
            self.close()
            raise UserError(f"{self.folder} is of another export that was not finished. Finish it with its own "
                            f"command, or delete that folder.")

    def begun(self) -> None:
        """The files are laid out: parts may be written, and written ones count."""
        write_json(self.folder / WORK / "plan.json", self.identity)
        self.fresh = False

    def done(self) -> dict[int, list[Region]]:
        """What was written, by the number of the part."""
        return {line["part"]: [(path, start, size, digest) for path, start, size, digest in line["regions"]]
                for line in read_lines(self.folder / WORK / "parts.jsonl", appended=True)}

    def add(self, part: int, regions: list[Region]) -> None:
        """A part is written."""
        append_line(self.folder / WORK / "parts.jsonl", {"part": part, "regions": regions})

    def forget(self) -> None:
        """Write all parts again."""
        (self.folder / WORK / "parts.jsonl").unlink(missing_ok=True)

    def publish(self, manifest: dict[str, Any]) -> None:
        """Commit: the manifest, then the folder under its name."""
        write_json(self.folder / MANIFEST, {**manifest, "identity": self.identity})
        self.folder.rename(self.out)  # what is there is empty, or this fails
        sync(self.out.parent)
        shutil.rmtree(self.out / WORK)

    def close(self) -> None:
        """Let others at it."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _take(self) -> None:
        self._lock = os.open(self.folder / WORK / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"Another process is exporting to {self.folder}. Wait for it, or give another "
                            f"--out.") from None


def verified(folder: Path, name: str, regions: Iterable[Region]) -> dict[str, Any]:
    """Read a whole file back: its path, bytes and sha256.

    Raises:
        UserError: it does not hold, end to end, what was written.
    """
    whole, at = hashlib.sha256(), 0
    with open(folder / name, "rb") as file:
        for _, start, size, digest in sorted(regions, key=lambda region: region[1:3]):
            own, left = hashlib.sha256(), size
            while left and (data := file.read(min(left, 1 << 20))):
                own.update(data)
                whole.update(data)
                left -= len(data)
            if start != at or left or own.hexdigest() != digest:
                raise UserError(f"{folder / name} does not hold at byte {start} what was written there. Check the "
                                f"disk, delete {folder} and run the command again.")
            at += size
        if file.read(1):
            raise UserError(f"{folder / name} is longer than what was written. Delete {folder} and run the command "
                            f"again.")
    return {"path": name, "bytes": at, "sha256": whole.hexdigest()}


def by_file(parts: Iterable[list[Region]]) -> dict[str, list[Region]]:
    """Regions of each file."""
    found = defaultdict(list)
    for regions in parts:
        for region in regions:
            found[region[0]].append(region)
    return dict(found)


def _is_export(out: Path, identity: dict[str, Any]) -> bool:
    """Whether `out` is this very export; UserError if it is there and is anything else."""
    if not os.path.lexists(out):
        return False
    if out.is_dir() and not any(out.iterdir()):
        return False
    try:
        found = read_json(out / MANIFEST)
    except (OSError, ValueError):
        found = None
    if isinstance(found, dict) and found.get("identity") == identity:
        return True
    raise UserError(f"{out} is there already and is {'another export' if found else 'no export'}: nothing is written "
                    f"over it. Give another --out, or remove it.")
