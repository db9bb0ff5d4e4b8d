"""Files of a run at a place in an object store: whose they are first, the list of them last.

    owner.json    whose place it is, and which process writes there now
    ...           the files, by their paths
    copy.json     put last: every file with size and sha256. Without it there is no copy

Whoever puts files again, or removes them, removes copy.json first: at each moment a copy is whole or none. The process
that claimed the place last has it. An earlier one finds that out before each file that it puts, and before it changes
what counts: at most the files that it is putting at that moment still arrive. Their hashes show it to who fetches them.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, TypedDict
from uuid import uuid4

from drover.pipeline.core.errors import UserError, all_problems
from drover.pipeline.core.files import Ledger, Outputs, parsed_json, problem_of, typed
from drover.pipeline.core.ordered_map import ordered_map
from drover.pipeline.storage.store import CHECKED, Entry, Exists, Missing, Store, preflight

COPY = "copy.json"
OWNER = "owner.json"
FORMAT = 1
SENT = "copies"
"""In a stage's folder: ledgers of what was sent, one for each place."""
AT_ONCE = 8
"""Files that a process sends or fetches at the same time; a large one is sent in several parts at once anyway."""
Record = Mapping[str, Any]
"""Of a file: path, bytes, sha256."""


class DamagedCopyError(UserError):
    """What lies in the store is not what was put there."""


class CopyRecord(TypedDict):
    """What copy.json holds. of: what was copied: a run's name, the number of a step, the digest of token shards."""

    format: Literal[1]
    of: str
    files: Outputs


class _Named(TypedDict):
    format: Literal[1]
    name: str
    writer: str


class OwnerRecord(_Named, total=False):
    """What owner.json holds. name: of the owner; writer: of the process that claimed it last.

    id, fingerprint, drift: of the training whose checkpoints lie there. files: paths of a copy that is not finished.
    """

    id: str
    fingerprint: dict[str, Any]
    drift: list[dict[str, Any]]
    files: list[str]


class Owner:
    """Whose a place is.

    Attributes:
        content: an `OwnerRecord`, as it was found or written; None where nobody owns the place.
    """

    def __init__(self, store: Store) -> None:
        self.store, self._writer = store, uuid4().hex
        self.content = self._read()

    def _read(self) -> dict[str, Any] | None:
        try:
            return dict(typed(parsed_json(self.store.read(OWNER)), OwnerRecord))
        except Missing:
            return None
        except ValueError as error:
            raise UserError(f"{self.store.url}/{OWNER} is not what Drover puts there ({error}). Give another address, "
                            f"or move away what is there.") from None

    def claim(self, **content: Any) -> None:
        """Write the record; from now on only this process may write there. UserError if somebody else was quicker."""
        mine = {"format": FORMAT, **content, "writer": self._writer, "host": platform.node(), "process": os.getpid(),
                "job": os.environ.get("SLURM_JOB_ID", ""), "at": datetime.now(UTC).isoformat(timespec="seconds")}
        data = (json.dumps(mine, indent=1) + "\n").encode()
        try:
            self.store.put(OWNER, data, only_new=self.content is None)
        except Exists:
            self.refuse_lost()  # unless only the answer to our own write was lost
        self.content = mine

    def refuse_lost(self) -> None:
        """UserError if another process has claimed the place since this one did."""
        found = self._read()
        if found is None or found["writer"] != self._writer:
            by = f"{describe(found)} took it over" if found else f"{OWNER} was removed"
            raise UserError(f"{self.store.url} is not this process's any more: {by}. It writes nothing there now. Give "
                            f"each run an address of its own.")


def describe(owner: Mapping[str, Any]) -> str:
    """Which process claimed a place, in words."""
    job = f", Slurm job {owner['job']}" if owner.get("job") else ""
    return f"process {owner.get('process', '?')} on {owner.get('host', '?')}{job} (at {owner.get('at', '?')})"


class Mirror:
    """The files below one prefix, and their list."""

    def __init__(self, store: Store) -> None:
        self.store = store

    def read(self) -> dict[str, Any]:
        """The `CopyRecord` of a finished copy.

        Raises:
            Missing: there is none.
            DamagedCopyError: copy.json is not one that was put there.
        """
        try:
            return dict(typed(parsed_json(self.store.read(COPY)), CopyRecord))
        except ValueError as error:
            raise DamagedCopyError(f"{self.store.url}/{COPY} is damaged ({error})") from None

    def reopen(self) -> None:
        """Make the copy count no more, if there is one: files may be put again, or removed."""
        self.store.delete([COPY])

    def finish(self, of: str, files: Sequence[Record]) -> None:
        """Make the copy count: all that `files` tells of has been put."""
        listed = [{name: record[name] for name in ("path", "bytes", "sha256")} for record in files]
        self.store.put(COPY, (json.dumps({"format": FORMAT, "of": of, "files": listed}, indent=1) + "\n").encode())

    def send(self, folder: Path, records: Sequence[Record], check: Callable[[], None] = lambda: None,
             sent: Callable[[Record, Entry], None] = lambda record, entry: None) -> int:
        """Put files of `folder`, several at a time; returns their bytes.

        check: called before each, raises where nothing is to be put any more. sent: called after each, in order.

        Raises:
            UserError: a file is not what its record says (then nothing of it is put), or the store does not take it.
        """
        def put(record: Record) -> Entry:
            # What flipped on the disk since it was written must not become the copy that is to replace it one day.
            if problem := problem_of(folder / record["path"], record):
                raise UserError(f"{problem}, so it is not copied to {self.store.url}. Check the disk; delete the file "
                                f"and run its stage again.")
            check()
            return self.store.put(record["path"], folder / record["path"])
        for record, entry in zip(records, ordered_map(put, records, AT_ONCE, name="copy"), strict=True):
            sent(record, entry)
        return sum(int(record["bytes"]) for record in records)

    def fetch(self, folder: Path, records: Sequence[Record]) -> int:
        """Fetch files into `folder`, each whole or not at all; returns their bytes.

        Raises:
            DamagedCopyError: one is missing, or is not what its record says.
            UserError, OSError: the store cannot be read, or the disk not be written.
        """
        def get(record: Record) -> int:
            try:
                digest = self.store.fetch(record["path"], folder / record["path"])
            except Missing:
                raise DamagedCopyError(f"{self.store.url}/{record['path']} is missing") from None
            if digest != record["sha256"]:
                raise DamagedCopyError(f"{self.store.url}/{record['path']} has other content than was put there")
            return int(record["bytes"])
        return sum(ordered_map(get, records, AT_ONCE, name="copy"))

    def compare(self, records: Sequence[Record], advance: Callable[[], None]) -> None:
        """Read every file back; UserError names those whose content is not what their records say."""
        def digest(record: Record) -> str:
            with self.store.stream(record["path"]) as stream:
                return hashlib.file_digest(stream, "sha256").hexdigest()
        wrong = []
        for record, found in zip(records, ordered_map(digest, records, AT_ONCE, name="copy"), strict=True):
            if found != record["sha256"]:
                wrong.append(f"{self.store.url_of(record['path'])}: sha256 {record['sha256'][:12]} -> {found[:12]}")
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
    """What a copy did: files and bytes that were sent, and files that were there already."""

    sent: int
    sent_bytes: int
    there: int

    def __str__(self) -> str:
        return f"{self.sent:,} files sent ({self.sent_bytes / 1e6:,.1f} MB), {self.there:,} were there already"


def ledger_of(stage_folder: Path, url: str) -> Ledger:
    """Of what was sent from a stage's folder to a place: by path and sha256, the ETag that the store gave it; and under
    the name "" that a copy was finished."""
    return Ledger(stage_folder / SENT / hashlib.sha256(url.rstrip("/").encode()).hexdigest()[:16])


def copy_files(url: str, name: str, of: str, folder: Path, files: Sequence[Record], *, ledger: Ledger,
               advance: Callable[[], None] = lambda: None) -> Copied:
    """Copy files to a place, and then their list. What an earlier copy sent is not sent again.

    Args:
        name: whose the place is to be. of: what is copied.
        advance: called after each file.

    Raises:
        UserError: the place is another owner's, the store does not keep what it is sent, or a file is not what its
            record says.
    """
    store, owner = Store(url), Owner(Store(url))
    mirror = Mirror(store)
    preflight(store)
    there = {entry.path: entry for entry in store.list() if not entry.path.startswith(CHECKED)}
    if owner.content is None and there:
        raise UserError(f"{url} holds {min(there)} and perhaps more, but no {OWNER}: it is not the place of a copy. "
                        f"Nothing is written there; give another place.")
    if owner.content is not None and (owner.content["name"] != name or "id" in owner.content):
        theirs = owner.content["name"]
        holds = f"checkpoints of {theirs}, and no files" if "id" in owner.content else \
            f"what was copied of {theirs}, not"
        raise UserError(f"{url} holds {holds} of {name}. Nothing there is overwritten; give another place, or delete "
                        f"what is there.")
    sent = ledger.found({record["path"]: record["sha256"] for record in files})

    old, finished = (owner.content or {}).get("files", []), False
    with suppress(Missing, DamagedCopyError):
        found = mirror.read()
        old, finished = [record["path"] for record in found["files"]], found["of"] == of

    def is_there(record: Record) -> bool:
        entry, known = there.get(record["path"]), sent.get(record["path"])
        return entry is not None and entry.size == record["bytes"] and (entry.etag == known if known else finished)
    todo = [record for record in files if not is_there(record)]
    for _ in range(len(files) - len(todo)):
        advance()

    def note(record: Record, entry: Entry) -> None:
        ledger.add(record["path"], record["sha256"], entry.etag)
        advance()
    if todo or not finished:
        # Only what our own lists name is ours to remove, and it is named until it is gone.
        kept = {record["path"] for record in files}
        owner.claim(name=name, files=sorted({*old, *kept}))
        mirror.reopen()
        mirror.send(folder, todo, owner.refuse_lost, note)
        owner.refuse_lost()
        store.delete(sorted({*old} - kept))
        mirror.finish(of, files)
    ledger.add("", of, "")
    return Copied(len(todo), sum(record["bytes"] for record in todo), len(files) - len(todo))


def listed_files(store: Store, records: Iterable[Record]) -> tuple[list[str], list[str]]:
    """Which files are missing or cut, as sentences, and the ETag of each: by one listing."""
    entries = {entry.path: entry for entry in store.list()}
    problems, etags = list[str](), list[str]()
    for record in records:
        entry, url = entries.get(record["path"]), store.url_of(record["path"])
        etags.append(entry.etag if entry is not None else "")
        if entry is None:
            problems.append(f"{url} is missing")
        elif entry.size != record["bytes"]:
            problems.append(f"{url} has {entry.size:,} bytes instead of {record['bytes']:,}")
    return problems, etags
