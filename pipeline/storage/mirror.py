"""A run's files in an object store, such as its export: first their owner, last the list of them.

    owner.json    who owns the place, and which process writes there now
    ...           the files, by their paths
    copy.json     put last: every file with size and sha256. Without it there is no copy

To replace or remove files, a process first removes copy.json: so a copy is complete or absent at any moment. The
process that claimed the place last owns it. An earlier one notices that before each file, and before each change of
copy.json. At most the files that it is uploading at that moment still arrive; readers detect them by their hashes.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, TypedDict
from uuid import uuid4

from drover.pipeline.core.background import ordered_map
from drover.pipeline.core.errors import UserError, all_problems
from drover.pipeline.core.files import Ledger, Outputs, Record, parsed_json, problem_of, publish, typed
from drover.pipeline.storage.store import CHECKED, Exists, Missing, Store, StoredObject, preflight

COPY = "copy.json"
OWNER = "owner.json"
FORMAT = 1
SENT = "copies"
"""In a stage's folder: ledgers of uploads, one for each place."""
EXPORT = "hf/"
"""In the folder of the stage convert: what it exports."""
AT_ONCE = 8
"""Files that a process transfers at the same time; a large one is sent in several parts at once anyway."""


class DamagedCopyError(UserError):
    """The store does not hold what was put there."""


class CopyRecord(TypedDict):
    """The content of copy.json. of: what was copied: a run's name, the number of a step, or the digest of token
    shards."""

    format: Literal[1]
    of: str
    files: Outputs


class _Named(TypedDict):
    format: Literal[1]
    name: str
    writer: str


class OwnerRecord(_Named, total=False):
    """The content of owner.json. name: of the owner; writer, host, process, job, at: of the process that claimed it
    last.

    id, fingerprint, accepted: of the training whose checkpoints are there. files: paths of an unfinished copy.
    """

    host: str
    process: int
    job: str
    at: str
    id: str
    fingerprint: Record
    accepted: list[str]
    files: list[str]


class Owner:
    """The owner of a place.

    Attributes:
        content: as found or written; None if nobody owns the place.
    """

    def __init__(self, store: Store) -> None:
        self.store = store
        self._writer = uuid4().hex
        self.content = self._read()

    def _read(self) -> OwnerRecord | None:
        try:
            owner: OwnerRecord = typed(parsed_json(self.store.read(OWNER)), OwnerRecord)
            return owner
        except Missing:
            return None
        except ValueError as error:
            raise UserError(f"{self.store.url}/{OWNER} was not written by Drover ({error}). Give another address, "
                            f"or move the files there away.") from None

    def claim(self, **content: Any) -> None:
        """Write the record; from now on only this process may write there. UserError if another process was faster."""
        mine = {"format": FORMAT, **content, "writer": self._writer, "host": platform.node(), "process": os.getpid(),
                "job": os.environ.get("SLURM_JOB_ID", ""), "at": datetime.now(UTC).isoformat(timespec="seconds")}
        data = (json.dumps(mine, indent=1) + "\n").encode()
        try:
            self.store.put(OWNER, data, only_new=self.content is None)
        except Exists:
            self.refuse_lost()  # passes if our own write succeeded and only its answer was lost
        self.content = typed(mine, OwnerRecord)

    def refuse_lost(self) -> None:
        """UserError if another process has claimed the place since this one did."""
        owner = self._read()
        if owner is None or owner["writer"] != self._writer:
            by = f"{describe(owner)} took it over" if owner else f"{OWNER} was removed"
            raise UserError(f"This process no longer owns {self.store.url}: {by}. It writes nothing there now. Give "
                            f"each run an address of its own.")


def describe(owner: OwnerRecord) -> str:
    """The process that claimed a place, in words."""
    job = f", Slurm job {owner['job']}" if owner.get("job") else ""
    return f"process {owner.get('process', '?')} on {owner.get('host', '?')}{job} (at {owner.get('at', '?')})"


class Mirror:
    """The files below one prefix, and their list."""

    def __init__(self, store: Store) -> None:
        self.store = store

    def read(self) -> CopyRecord:
        """The list of a finished copy.

        Raises:
            Missing: there is none.
            DamagedCopyError: copy.json is invalid.
        """
        try:
            copy: CopyRecord = typed(parsed_json(self.store.read(COPY)), CopyRecord)
            return copy
        except ValueError as error:
            raise DamagedCopyError(f"{self.store.url}/{COPY} is damaged ({error})") from None

    def reopen(self) -> None:
        """Invalidate the copy, if there is one, so that files may be replaced or removed."""
        self.store.delete([COPY])

    def finish(self, of: str, files: Outputs) -> None:
        """Complete the copy: all of `files` have been put."""
        listed = [{name: record[name] for name in ("path", "bytes", "sha256")} for record in files]
        self.store.put(COPY, (json.dumps({"format": FORMAT, "of": of, "files": listed}, indent=1) + "\n").encode())

    def send(self, folder: Path, records: Outputs, check: Callable[[], None] = lambda: None,
             sent: Callable[[Record, StoredObject], None] = lambda record, entry: None) -> int:
        """Upload files of `folder`, several at a time; returns their bytes.

        check: called before each file; raises if nothing may be uploaded any more. sent: called after each, in order.

        Raises:
            UserError: a file differs from its record (then it is not uploaded), or the store does not take it.
        """
        def put(record: Record) -> StoredObject:
            # A file that was corrupted on the disk must not become the copy that may have to replace it.
            if problem := problem_of(folder / record["path"], record):
                raise UserError(f"{problem}, so it is not copied to {self.store.url}. Check the disk; delete the file "
                                f"and run its stage again.")
            check()
            return self.store.put(record["path"], folder / record["path"])
        for record, entry in zip(records, ordered_map(put, records, AT_ONCE, name="copy"), strict=True):
            sent(record, entry)
        return sum(int(record["bytes"]) for record in records)

    def fetch(self, folder: Path, records: Outputs, advance: Callable[[], None] = lambda: None) -> int:
        """Download files into `folder`, each complete or not at all; returns their bytes. advance: called after each.

        Raises:
            DamagedCopyError: one is missing, or differs from its record.
            UserError, OSError: the store cannot be read, or the disk not be written.
        """
        def get(record: Record) -> int:
            try:
                digest = self.store.fetch(record["path"], folder / record["path"])
            except Missing:
                raise DamagedCopyError(f"{self.store.url}/{record['path']} is missing") from None
            if digest != record["sha256"]:
                (folder / record["path"]).unlink()
                raise DamagedCopyError(f"{self.store.url}/{record['path']} has other content than was put there")
            return int(record["bytes"])
        size = 0
        for fetched in ordered_map(get, records, AT_ONCE, name="copy"):
            size += fetched
            advance()
        return size

    def compare(self, records: Outputs, advance: Callable[[], None]) -> None:
        """Read every file back; UserError names those whose content differs from their records."""
        def digest(record: Record) -> str:
            with self.store.stream(record["path"]) as stream:
                return hashlib.file_digest(stream, "sha256").hexdigest()
        wrong = []
        for record, result in zip(records, ordered_map(digest, records, AT_ONCE, name="copy"), strict=True):
            if result != record["sha256"]:
                wrong.append(f"{self.store.url_of(record['path'])}: sha256 {record['sha256'][:12]} -> {result[:12]}")
            advance()
        if wrong:
            raise UserError(all_problems(wrong, f"{len(wrong):,} files in {self.store.url} are not what was sent") +
                            "\nDelete these objects and copy again; use another server if that does not help.")

    def remove(self) -> None:
        """Remove the copy, its list first."""
        self.reopen()
        self.store.delete([entry.path for entry in self.store.list()])


@dataclass(frozen=True)
class Copied:
    """The result of an upload: files and bytes that were sent, and files that were there already."""

    sent: int
    sent_bytes: int
    there: int

    def __str__(self) -> str:
        return f"{self.sent:,} files sent ({self.sent_bytes / 1e6:,.1f} MB), {self.there:,} were there already"


def ledger_of(stage_folder: Path, url: str) -> Ledger:
    """The ledger of uploads from a stage's folder to a place: the store's ETag by path and sha256; and under the name
    "" that a copy was finished."""
    return Ledger(stage_folder / SENT / hashlib.sha256(url.rstrip("/").encode()).hexdigest()[:16])


def copy_files(url: str, name: str, of: str, folder: Path, files: Outputs, *, ledger: Ledger,
               advance: Callable[[], None] = lambda: None) -> Copied:
    """Upload files to a place, and then their list. What an earlier upload sent is not sent again.

    Args:
        name: of the place's owner. of: what is uploaded.
        advance: called after each file.

    Raises:
        UserError: the place has another owner, the store does not keep what it is sent, or a file differs from its
            record.
    """
    store = Store(url)
    owner = Owner(store)
    mirror = Mirror(store)
    preflight(store)
    there = {entry.path: entry for entry in store.list() if not entry.path.startswith(CHECKED)}
    if owner.content is None and there:
        raise UserError(f"{url} holds {min(there)} and perhaps more, but no {OWNER}: it is not a place of Drover's. "
                        f"Nothing is written there; give another place.")
    if owner.content is not None and (owner.content["name"] != name or "id" in owner.content):
        what = "checkpoints" if "id" in owner.content else "files"
        raise UserError(f"{url} holds {what} of {owner.content['name']}, not files of {name}. Nothing there is "
                        f"overwritten; give another place, or delete the files there.")
    sent = ledger.recorded({record["path"]: record["sha256"] for record in files})

    old = owner.content.get("files", []) if owner.content is not None else []
    finished = False
    with suppress(Missing, DamagedCopyError):
        result = mirror.read()
        old, finished = [record["path"] for record in result["files"]], result["of"] == of

    def is_there(record: Record) -> bool:
        entry, known = there.get(record["path"]), sent.get(record["path"])
        return entry is not None and entry.size == record["bytes"] and (entry.etag == known if known else finished)
    todo = [record for record in files if not is_there(record)]
    for _ in range(len(files) - len(todo)):
        advance()

    def note(record: Record, entry: StoredObject) -> None:
        ledger.add(record["path"], record["sha256"], entry.etag)
        advance()
    if todo or not finished:
        # Only files in our own lists may be removed; they stay listed until they are gone.
        kept = {record["path"] for record in files}
        owner.claim(name=name, files=sorted({*old, *kept}))
        mirror.reopen()
        mirror.send(folder, todo, owner.refuse_lost, note)
        owner.refuse_lost()
        store.delete(sorted({*old} - kept))
        mirror.finish(of, files)
    ledger.add("", of, "")
    return Copied(len(todo), sum(record["bytes"] for record in todo), len(files) - len(todo))


def due(config: Any, folder: Path, manifest: Any) -> str:
    """What the finished stage in `folder` still has to do, as a phrase; "" if the upload is done or not configured."""
    url = config.convert.copy_to
    done = url is None or ledger_of(folder, url).recorded({"": manifest.digest})
    return "" if done else f"the upload to {url} is pending"


def copy_export(url: str, name: str, folder: Path, manifest: Any, say: Callable[[str], None]) -> None:
    """Upload the outputs of the stage convert in `folder`; UserError like `copy_files`. name: of the run."""
    files = [{**record, "path": record["path"].removeprefix(EXPORT)} for record in manifest.outputs]
    say(f"{copy_files(url, name, manifest.digest, folder / EXPORT, files, ledger=ledger_of(folder, url))} in {url}")


def fetch_copy(url: str, folder: Path) -> int:
    """Download an export or a checkpoint into a new folder and compare each file with its hash; returns the bytes.

    Raises:
        UserError: there is no complete copy, or the folder exists and is not empty.
    """
    mirror = Mirror(Store(url))
    try:
        files = mirror.read()["files"]
    except Missing:
        raise UserError(f"{url} holds no finished copy that Drover made: there is no {COPY}. Give the address of an "
                        f"export (convert.copy_to), or of a checkpoint (train.checkpoint.copy_to/step-...); or wait "
                        f"for the run that makes the copy, or continue it.") from None
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder} exists already. Give a new folder.")
    folder.parent.mkdir(parents=True, exist_ok=True)
    # Download next to it under a unique name and rename: `<folder>.tmp` may be the user's.
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as scratch:
        staging = Path(scratch) / folder.name
        staging.mkdir()
        size = mirror.fetch(staging, files)
        publish(staging, folder)
    return size
