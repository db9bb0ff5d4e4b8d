"""Files from outside of a run that its stages read: their recorded hashes, and whether they have changed since.

A file is hashed if its size or time differs from the recorded one, and the hash is stored. A missing file counts as
unchanged: users delete raw text once its tokens are made.

The tasks of a stage hash the files that they read (`task_files` of `Stage.functions`), so that no file is read twice.
Until all tasks have done so, the name, size and time of each file represent its content. The tasks' own keys decide
which of them are done again after a change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from drover.pipeline.config.places import EXTERNAL
from drover.pipeline.config.section import flatten
from drover.pipeline.config.tree import Config
from drover.pipeline.contract.stages import Stage
from drover.pipeline.contract.tasks import Ledger
from drover.pipeline.core.console import first as first_names
from drover.pipeline.core.console import say
from drover.pipeline.core.errors import AbsentInputError, UserError
from drover.pipeline.core.files import Record, changed_ns, sha256_json
from drover.pipeline.core.ordered_map import ordered_map
from drover.pipeline.storage.object_files import InputFile, ObjectFile, content_hash

HASHES = ".hashes"
"""In a run folder: a ledger of hashes of files whose size or time is not what a manifest says."""
LONG_BYTES = 1_000_000_000
"""If more bytes than this are to be hashed, a line is printed."""
HASHING = 4
"""Files hashed at one time."""


@dataclass(frozen=True)
class PresentFiles:
    """A stage's external files as they are now.

    records: those that exist, with name, path, bytes, mtime_ns and sha256.
    incomplete: sources of which a configured file or glob is missing.
    """

    records: list[Record]
    incomplete: frozenset[str] = field(default_factory=frozenset)

    def __add__(self, other: PresentFiles) -> PresentFiles:
        """The files of both."""
        return PresentFiles(sorted([*self.records, *other.records], key=lambda record: str(record["name"])),
                       self.incomplete | other.incomplete)

    def compared(self, recorded: Iterable[Record], old: Mapping[str, str]) -> dict[str, str]:
        """sha256 by name, for a comparison with `old`, which was made together with `recorded`. Files of an incomplete
        source that are missing have their old hash.

        If all configured globs and files of a source exist, a missing file is left out, and so counts as a change.
        """
        # Names are relative to the folder that holds all files of a source, which may differ if some are missing.
        names = {str(record["path"]): str(record["name"]) for record in recorded}
        files = {name: digest for name, digest in old.items() if name.partition("/")[0] in self.incomplete}
        for record in self.records:
            recorded_name = names.get(record["path"]) if _source(record) in self.incomplete else None
            files[recorded_name or record["name"]] = record["sha256"]
        return files

    def absent(self, recorded: Iterable[Record]) -> list[str]:
        """Names of the recorded files that are missing without counting as a change."""
        there = {record["path"] for record in self.records} | {record["name"] for record in self.records}
        return [record["name"] for record in recorded if _source(record) in self.incomplete
                and record["path"] not in there and record["name"] not in there]


def look(stage: str, find: Callable[[], list[tuple[str, InputFile]]], known: Sequence[Record], *, run_folder: Path,
         remember: bool, strict: bool) -> PresentFiles:
    """The external files of a stage now.

    Args:
        find: returns them as (name, path).
        known: records. If size and time are equal, their hashes are taken.
        remember: store hashes in the run's folder, and take them from there.
        strict: all files have to exist.

    Raises:
        UserError: a file cannot be read; with `strict`, a configured file is missing.
    """
    incomplete: set[str] = set()
    try:
        result = find()
    except UserError as error:
        if strict:
            raise
        result, incomplete = (sorted(error.existing, key=itemgetter(0)), error.sources) \
            if isinstance(error, AbsentInputError) else ([], set(map(_source, known)))
    there = list(_looked_at(result, strict))
    incomplete |= {name.partition("/")[0] for (name, _), record in zip(result, there, strict=True) if record is None}
    records = [record for record in there if record is not None]
    by_path, by_name = ({str(record[key]): record for record in known} for key in ("path", "name"))
    todo = dict[str, list[Record]]()
    for record in records:
        old = by_name.get(record["name"], {})
        if old.get("path") != record["path"]:
            old = by_path.get(record["path"], old)
        if all(old.get(key) == record[key] for key in ("path", "bytes", "mtime_ns")):
            record["sha256"] = old["sha256"]
        else:
            todo.setdefault(record["path"], []).append(record)
    for path, digest in _digests(stage, {path: same[0] for path, same in todo.items()}, run_folder, remember).items():
        for record in todo[path]:
            record["sha256"] = digest
    return PresentFiles(records, frozenset(incomplete))


def listed_files(files: Sequence[tuple[str, InputFile]]) -> list[Record]:
    """Name, absolute path, bytes and mtime_ns of files, and the ETag of objects, in their order; UserError if one is
    missing."""
    return [{**record, **({"etag": path.etag} if isinstance(path, ObjectFile) else {})}
            for (_, path), record in zip(files, _looked_at(files, strict=True), strict=True) if record is not None]


def _looked_at(files: Sequence[tuple[str, InputFile]], strict: bool) -> Iterator[Record | None]:
    """Name, absolute path, bytes and mtime_ns of each file, several at a time; None for a missing one, or with `strict`
    UserError."""
    def look_at(file: tuple[str, InputFile]) -> Record | None:
        name, path = file
        try:
            stat = path.stat()
        except OSError as error:
            if isinstance(error, FileNotFoundError) and not strict:
                return None
            raise _unreadable(path, error) from None
        return {"name": name, "path": str(path.absolute()), "bytes": stat.st_size, "mtime_ns": changed_ns(stat)}
    return ordered_map(look_at, files, batch=512)


def hashed_now(listing: Sequence[Record]) -> list[Record]:
    """The records with the sha256 of each file, for a stage whose tasks did not hash the files."""
    return [{**record, "sha256": content_hash(record["path"])} for record in listing]


def listing_digest(listing: Sequence[Record]) -> str:
    """A digest of names, sizes and times: it represents the files in the identity of a started stage."""
    return sha256_json([_seen(record) for record in listing])


def refuse_unread(listing: Sequence[Record], read: Sequence[Record], stage: str) -> None:
    """UserError if the files that the tasks read differ from the listing at their start."""
    known = {str(record["name"]): _seen(record) for record in read}
    other = [str(record["name"]) for record in listing if known.pop(record["name"], None) != _seen(record)]
    if other := [*other, *known]:
        raise UserError(f"{len(other):,} input files were changed while {stage} was reading them "
                        f"({first_names(other)}), so it is not committed. Run it again: it reads the current files.")


def _seen(record: Record) -> list[Any]:
    return [record["name"], record["bytes"], record["mtime_ns"]]


def gathered(inputs: Sequence[Record]) -> list[Record]:
    """Records for `Work.commit(files=...)`, from what each task recorded of the files that it read.

    Args:
        inputs: name, path, bytes, mtime_ns and sha256; of a file that is read in ranges only the first has a hash,
            that of the whole file.

    Returns:
        name, path, bytes, mtime_ns and sha256 of each file, sorted by name.

    Raises:
        UserError: tasks read different sizes, times or contents of one file.
    """
    of_file: dict[str, list[Record]] = {}
    for entry in inputs:
        of_file.setdefault(entry["name"], []).append(entry)
    records = []
    changed = []
    for name, entries in sorted(of_file.items()):
        first = {key: entries[0][key] for key in ("name", "path", "bytes", "mtime_ns")}
        hashes = {entry["sha256"] for entry in entries if entry["sha256"] is not None}
        if len(hashes) != 1 or any(entry[key] != first[key] for entry in entries for key in ("bytes", "mtime_ns")):
            changed.append(name)
        records.append({**first, "sha256": min(hashes)})
    if changed:
        raise UserError(f"{len(changed):,} input files changed between two tasks that read them "
                        f"({first_names(changed)}). Make sure that no program writes to them, and run the stage again: "
                        f"it reads these files again.")
    return records


def places(stage: Stage, config: Config) -> Record:
    """The settings that name the places of the stage's external files, by their full names."""
    if not {"files", "task_files"} & stage.functions.keys():
        return {}
    parts = {part: config.part(part) for part in stage.reads}
    values = flatten({name: part.model_dump(mode="json") if isinstance(part, BaseModel) else part
                      for name, part in parts.items()})
    return {key: value for key, value in values.items() if EXTERNAL & set(key.split("."))}


def source_of_place(key: str, config: Config) -> str:
    """The source that a key of `places` is about: the part of its files' names before the first `/`."""
    parts = key.split(".")
    if parts[-1] == "init_from":
        return parts[-1]
    if parts[:2] == ["shard", "filters"]:
        return parts[1]
    if parts[:2] != ["shard", "sources"]:
        return parts[0]
    sources = config.shard.sources
    number = int(parts[2])
    return sources[number].name if number < len(sources) else ""


def _digests(stage: str, files: Mapping[str, Record], run_folder: Path, remember: bool) -> dict[str, str]:
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


def _source(record: Record) -> str:
    return str(record["name"]).partition("/")[0]


def _hashed(path: str) -> str:
    try:
        return content_hash(path)
    except OSError as error:
        raise _unreadable(path, error) from None


def _unreadable(path: InputFile | str, error: OSError) -> UserError:
    return UserError(f"The input file {path} cannot be read: {error.strerror}.")
