"""Files from outside of a run that its stages read: their recorded hashes, and whether they have changed since.

A file is hashed if its size or time differs from the recorded one, and the hash is stored. A missing file counts as
unchanged: users delete raw text once its tokens are made.

The tasks of a stage hash the files that they read (`task_files` of `Stage.functions`), so that no file is read twice.
Until all tasks have done so, the name, size and time of each file represent its content. The tasks' own keys decide
which of them are done again after a change.

`InputCheck` hashes files that a stage reads in a background thread while it works.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any

from drover.pipeline.contract.manifest import ExternalFile, ListedFile
from drover.pipeline.core.background import BackgroundWorker, ordered_map
from drover.pipeline.core.console import first as first_names
from drover.pipeline.core.console import say
from drover.pipeline.core.errors import AbsentInputError, UserError
from drover.pipeline.core.files import Ledger, changed_ns, sha256_file, sha256_json
from drover.pipeline.storage.object_files import InputFile, ObjectFile, content_hash

HASHES = ".hashes"
"""In a run folder: a ledger of hashes of files whose size or time is not what a manifest says."""
LONG_BYTES = 1_000_000_000
"""If more bytes than this are to be hashed, a line is printed."""
HASHING = 4
"""Files hashed at one time."""


class ReadFile(ListedFile):
    """What a task recorded of a file that it read. Of a file that is read in ranges only the first has a hash, that of
    the whole file."""

    sha256: str | None


@dataclass(frozen=True)
class PresentFiles:
    """A stage's external files as they are now.

    records: those that exist. incomplete: sources of which a configured file or glob is missing.
    """

    records: list[ExternalFile]
    incomplete: frozenset[str]

    def __add__(self, other: PresentFiles) -> PresentFiles:
        """The files of both."""
        return PresentFiles(sorted([*self.records, *other.records], key=itemgetter("name")),
                            self.incomplete | other.incomplete)

    def compared(self, recorded: Sequence[ExternalFile]) -> dict[str, str]:
        """sha256 by name, for a comparison with `recorded`. Files of an incomplete source that are missing have their
        recorded hash.

        If all configured globs and files of a source exist, a missing file is left out, and so counts as a change.
        """
        # Names are relative to the folder that holds all files of a source, which may differ if some are missing.
        names = {record["path"]: record["name"] for record in recorded}
        files = {record["name"]: record["sha256"] for record in recorded if _source(record["name"]) in self.incomplete}
        for record in self.records:
            recorded_name = names.get(record["path"]) if _source(record["name"]) in self.incomplete else None
            files[recorded_name or record["name"]] = record["sha256"]
        return files

    def absent(self, recorded: Iterable[ExternalFile]) -> list[str]:
        """Names of the recorded files that are missing without counting as a change."""
        there = {record["path"] for record in self.records} | {record["name"] for record in self.records}
        return [record["name"] for record in recorded if _source(record["name"]) in self.incomplete
                and record["path"] not in there and record["name"] not in there]


def look(stage: str, find: Callable[[], list[tuple[str, InputFile]]], known: Sequence[ExternalFile], *,
         run_folder: Path, remember: bool, strict: bool) -> PresentFiles:
    """The external files of a stage now.

    Args:
        find: returns them as (name, path).
        known: records. If path, size and time are equal, their hashes are taken.
        remember: store hashes in the run's folder, and take them from there.
        strict: all files have to exist.

    Raises:
        UserError: a file cannot be read; with `strict`, a configured file is missing.
    """
    incomplete = set[str]()
    try:
        files = find()
    except UserError as error:
        if strict:
            raise
        files = []
        incomplete = {_source(record["name"]) for record in known}
        if isinstance(error, AbsentInputError):
            files = sorted(error.existing, key=itemgetter(0))
            incomplete = error.sources
    listed = list(_looked_at(files, strict))
    incomplete |= {_source(name) for (name, _), record in zip(files, listed, strict=True) if record is None}
    there = [record for record in listed if record is not None]
    hashes = {_state(record): record["sha256"] for record in known}
    new = {record["path"]: record for record in there if _state(record) not in hashes}
    digests = _digests(stage, new, run_folder, remember)
    hashes |= {_state(record): digests[path] for path, record in new.items()}
    return PresentFiles([{**record, "sha256": hashes[_state(record)]} for record in there], frozenset(incomplete))


def listed_files(files: Sequence[tuple[str, InputFile]]) -> list[ListedFile]:
    """Records of files, with the ETag of objects, in their order; UserError if one is missing."""
    listed = [record for record in _looked_at(files, strict=True) if record is not None]
    for (_, path), record in zip(files, listed, strict=True):
        if isinstance(path, ObjectFile):
            record["etag"] = path.etag
    return listed


def _looked_at(files: Sequence[tuple[str, InputFile]], strict: bool) -> Iterator[ListedFile | None]:
    """A record of each file, several at a time; None for a missing one, or with `strict` UserError."""
    def look_at(file: tuple[str, InputFile]) -> ListedFile | None:
        name, path = file
        try:
            stat = path.stat()
        except OSError as error:
            if isinstance(error, FileNotFoundError) and not strict:
                return None
            raise _unreadable(path, error) from None
        return {"name": name, "path": str(path.absolute()), "bytes": stat.st_size, "mtime_ns": changed_ns(stat)}
    return ordered_map(look_at, files, batch=512)


def hashed_now(listing: Sequence[ListedFile]) -> list[ExternalFile]:
    """The records with the sha256 of each file, for a stage whose tasks did not hash the files."""
    return [{**record, "sha256": content_hash(record["path"])} for record in listing]


def listing_digest(listing: Sequence[ListedFile]) -> str:
    """A digest of names, sizes and times: it represents the files in the identity of a started stage."""
    return sha256_json([_seen(record) for record in listing])


def refuse_unread(listing: Sequence[ListedFile], read: Sequence[ExternalFile], stage: str) -> None:
    """UserError if the files that the tasks read differ from the listing at their start."""
    known = {record["name"]: _seen(record) for record in read}
    other = [record["name"] for record in listing if known.pop(record["name"], None) != _seen(record)]
    if other := [*other, *known]:
        raise UserError(f"{len(other):,} input files were changed while {stage} was reading them "
                        f"({first_names(other)}), so it is not committed. Run it again: it reads the current files.")


def _seen(record: ListedFile) -> tuple[str, int, int]:
    return record["name"], record["bytes"], record["mtime_ns"]


def _state(record: ListedFile) -> tuple[str, int, int]:
    return record["path"], record["bytes"], record["mtime_ns"]


def gathered(inputs: Sequence[ReadFile]) -> list[ExternalFile]:
    """Records for `Work.commit(files=...)`, sorted by name, from what each task recorded of the files that it read.

    Raises:
        UserError: tasks read different sizes, times or contents of one file.
    """
    of_file = dict[str, list[ReadFile]]()
    for entry in inputs:
        of_file.setdefault(entry["name"], []).append(entry)
    records = list[ExternalFile]()
    changed = []
    for name, entries in sorted(of_file.items()):
        hashes = {entry["sha256"] for entry in entries} - {None}
        if len(hashes) != 1 or len(set(map(_seen, entries))) != 1:
            changed.append(name)
        first = entries[0]
        records.append({"name": name, "path": first["path"], "bytes": first["bytes"], "mtime_ns": first["mtime_ns"],
                        "sha256": str(hashes.pop())})
    if changed:
        raise UserError(f"{len(changed):,} input files changed between two tasks that read them "
                        f"({first_names(changed)}). Make sure that no program writes to them, and run the stage again: "
                        f"it reads these files again.")
    return records


def _digests(stage: str, files: Mapping[str, ListedFile], run_folder: Path, remember: bool) -> dict[str, str]:
    """The hash of each file, by its path. With `remember`, hashes of files with equal size and time are taken from the
    run's ledger, and new ones are added to it immediately."""
    keys = {path: f"{record['bytes']} {record['mtime_ns']}" for path, record in files.items()}
    ledger = Ledger(run_folder / HASHES)
    known = dict[str, str]()
    if remember and files:
        with suppress(OSError):  # the run may belong to another user
            known = ledger.recorded(keys)
    todo = [path for path in files if path not in known]
    if remember and (size := sum(files[path]["bytes"] for path in todo)) > LONG_BYTES:
        say(stage, f"hashing {len(todo):,} input files ({size / 1e9:.1f} GB) that are new or were modified since they "
                   f"were read")
    for path, digest in zip(todo, ordered_map(_hashed, todo, HASHING), strict=True):
        known[path] = digest
        if remember and run_folder.is_dir():
            with suppress(OSError):  # the run may belong to another user
                ledger.add(path, keys[path], digest, durable=False)
    return known


def _source(name: str) -> str:
    """The source of a file, by the file's name."""
    return name.partition("/")[0]


def _hashed(path: str) -> str:
    try:
        return content_hash(path)
    except OSError as error:
        raise _unreadable(path, error) from None


def _unreadable(path: InputFile | str, error: OSError) -> UserError:
    return UserError(f"The input file {path} cannot be read: {error.strerror}.")


TRIES = 2
"""How often a file is read before it counts as damaged: a disk or network may fail once."""
PAUSE_S = 1.0
LEFT_AFTER_S = 5.0
"""How long the end of a stage waits for the file that is being hashed."""


@dataclass(frozen=True)
class Expected:
    """A file and its expected hash. origin, fix: the sentences of an error that follow the path, and say what to do."""

    path: Path
    sha256: str
    origin: str
    fix: str


def output(folder: Path, record: Mapping[str, Any], stage: str) -> Expected:
    """An output of `stage`, by its record in its manifest."""
    return Expected(folder / record["path"], record["sha256"], f"is not what the stage {stage} committed",
                    f"Restore the right file, or delete it and run --stage {stage} again, which makes missing files")


def external(record: ExternalFile, stage: str) -> Expected:
    """A file from outside of the run, by the record that was made of it when `stage` started."""
    return Expected(Path(record["path"]), record["sha256"], f"has changed since the stage {stage} started",
                    f"Restore the old file, or run --stage {stage} --force to use the new one")


def wrong(file: Expected, digest: str) -> str:
    """The error message of a file with another hash."""
    return (f"{file.path} {file.origin}: sha256 {file.sha256[:12]} -> {digest[:12]}. {file.fix}; then the same command "
            f"continues.")


def refuse_changed(file: Expected) -> None:
    """UserError if the file exists with other content. If it is missing, the code that reads it reports this."""
    try:
        result = sha256_file(file.path)
    except FileNotFoundError:
        return
    except OSError as error:
        raise UserError(f"{file.path} cannot be read: {error.strerror}. {file.fix}.") from None
    if result != file.sha256:
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
        """End the thread without reading the rest. A long or hanging read is abandoned."""
        self._over.set()
        self._worker.close(LEFT_AFTER_S, drop=True)

    def _compare(self, file: Expected) -> None:
        with suppress(OSError, AttributeError):  # only on systems such as Linux a thread has a priority
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
        for attempt in range(TRIES):
            if self.problem or self._over.is_set():
                return
            problem = _problem(file)
            if not problem:
                return
            if attempt + 1 < TRIES:
                self._over.wait(PAUSE_S)
        self.problem = problem


def _problem(file: Expected) -> str:
    """The error message of a file that is not as expected; "" if it is."""
    try:
        digest = sha256_file(file.path)
    except OSError as error:
        return f"{file.path} cannot be read: {error.strerror}. {file.fix}; then the same command continues."
    except Exception as error:  # noqa: BLE001 - if the thread died silently, the file would count as correct
        return f"{file.path} could not be compared with its recorded hash: {type(error).__name__}: {error}."
    return "" if digest == file.sha256 else wrong(file, digest)
