"""Files from outside of a run that its stages read: what was read of them, and whether they are still that.

A file is hashed where its size or time is not the recorded one, and the hash is remembered. What is not there any more
has not changed: raw text is deleted once its tokens are made.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from pipeline.config.places import OUTSIDE
from pipeline.config.section import flatten
from pipeline.config.tree import Config
from pipeline.console import say
from pipeline.contract.manifest import Difference
from pipeline.contract.stages import Stage
from pipeline.errors import AbsentInputError, UserError
from pipeline.files import read_json, sha256_file, write_json

HASHES = ".hashes.json"
"""In a run folder: hashes of files whose size or time is not what a manifest says."""
LONG_BYTES = 1_000_000_000
"""So much is not hashed without a word."""
Record = dict[str, Any]


@dataclass(frozen=True)
class Outside:
    """A stage's outside files as they are now.

    records: of those that are there, with name, path, bytes, mtime_ns and sha256.
    incomplete: sources of which something that the configuration names is not there.
    """

    records: list[Record]
    incomplete: frozenset[str] = field(default_factory=frozenset)

    def compared(self, recorded: Iterable[Record], old: Mapping[str, str]) -> dict[str, str]:
        """sha256 by name, to be compared with `old`, of the time of `recorded`: what is not there is as it was.

        Of a source all of whose globs and files are there still, a file that is gone is left out: that is a change.
        """
        # Names are relative to the folder that holds all files of a source, which may be another if some are gone.
        names = {str(record["path"]): str(record["name"]) for record in recorded}
        files = {name: digest for name, digest in old.items() if name.partition("/")[0] in self.incomplete}
        for record in self.records:
            recorded_name = names.get(record["path"]) if _source(record) in self.incomplete else None
            files[recorded_name or record["name"]] = record["sha256"]
        return files

    def absent(self, recorded: Iterable[Record]) -> list[str]:
        """Names of the recorded files that are not there any more, where that is no change."""
        there = {record["path"] for record in self.records} | {record["name"] for record in self.records}
        return [record["name"] for record in recorded if _source(record) in self.incomplete
                and record["path"] not in there and record["name"] not in there]


def look(stage: Stage, config: Config, known: Mapping[str, Record], *, run_folder: Path, remember: bool,
         strict: bool) -> Outside:
    """The stage's outside files now.

    Args:
        known: records by path, whose hashes are taken where size and time are equal.
        remember: hashes are kept for the next time, in the run's folder, and taken from there.
        strict: all of them have to be there.

    Raises:
        UserError: a file cannot be read; with `strict`, one that the configuration names is not there.
    """
    incomplete: set[str] = set()
    try:
        found = stage.input_files(config)
    except UserError as error:
        if strict:
            raise
        found, incomplete = (sorted(error.found), error.sources) if isinstance(error, AbsentInputError) else \
            ([], set(map(_source, known.values())))
    stats = {path: _stat(path, strict) for _, path in found}
    incomplete |= {name.partition("/")[0] for name, path in found if stats[path] is None}
    hashes = Hashes(run_folder, remember)
    moved = [path for path, stat in stats.items() if stat and not _same(known.get(str(path.absolute())), stat)]
    hashes.take(stage.name, {str(path.absolute()): stat for path in moved if (stat := stats[path])})
    records = []
    for name, path in found:
        if (stat := stats[path]) is not None:
            full = str(path.absolute())
            old = known.get(full)
            digest = old["sha256"] if old is not None and _same(old, stat) else hashes.known[full]["sha256"]
            records.append({"name": name, "path": full, "bytes": stat.st_size, "mtime_ns": stat.st_mtime_ns,
                            "sha256": digest})
    return Outside(records, frozenset(incomplete))


def places(stage: Stage, config: Config) -> dict[str, Any]:
    """The settings that say where the stage's outside files are, by their full names."""
    if stage.files is None:
        return {}
    parts = {part: config.part(part) for part in stage.reads}
    values = flatten({name: part.model_dump(mode="json") if isinstance(part, BaseModel) else part
                      for name, part in parts.items()})
    return {key: value for key, value in values.items() if OUTSIDE & set(key.split("."))}


def changed_places(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[Difference]:
    """In what two `places` differ."""
    return [Difference(f"places.{key}", old.get(key), new.get(key)) for key in sorted(old.keys() | new.keys())
            if old.get(key) != new.get(key)]


def source_of_place(key: str, config: Config) -> str:
    """Which files a key of `changed_places` speaks of: the part of their names before the first `/`."""
    parts = key.split(".")
    if parts[-1] == "init_from":
        return parts[-1]
    if parts[1:3] == ["shard", "filters"]:
        return parts[2]
    if parts[1:3] != ["shard", "sources"]:
        return parts[1]
    sources, number = config.shard.sources, int(parts[3])
    return sources[number].name if number < len(sources) else ""


class Hashes:
    """Hashes that need not be computed again, of files that are not as a manifest says."""

    def __init__(self, run_folder: Path, remember: bool) -> None:
        self.path, self.remember = run_folder / HASHES, remember
        self.known: dict[str, Record] = {}

    def take(self, stage: str, files: Mapping[str, os.stat_result]) -> None:
        """Have `known` hold the hash of each file, as it is now."""
        if not files:
            return
        if self.remember:
            with suppress(OSError, ValueError):
                self.known = dict(read_json(self.path))
        todo = {path: stat for path, stat in files.items() if not _same(self.known.get(path), stat)}
        if self.remember and (size := sum(stat.st_size for stat in todo.values())) > LONG_BYTES:
            say(stage, f"hashing {len(todo):,} input files ({size / 1e9:.1f} GB) that are new or have another time "
                       f"than when they were read")
        for path, stat in todo.items():
            self.known[path] = {"bytes": stat.st_size, "mtime_ns": stat.st_mtime_ns, "sha256": _hashed(Path(path))}
        if todo and self.remember and self.path.parent.is_dir():
            with suppress(OSError):  # the run may be another user's
                write_json(self.path, self.known)


def _same(record: Record | None, stat: os.stat_result) -> bool:
    try:
        return record is not None and (record["bytes"], record["mtime_ns"]) == (stat.st_size, stat.st_mtime_ns)
    except (KeyError, TypeError):  # torn
        return False


def _source(record: Record) -> str:
    return str(record["name"]).partition("/")[0]


def _stat(path: Path, strict: bool) -> os.stat_result | None:
    """None for a file that is not there."""
    try:
        return path.stat()
    except FileNotFoundError as error:
        if strict:
            raise _unreadable(path, error) from None
        return None
    except OSError as error:
        raise _unreadable(path, error) from None


def _hashed(path: Path) -> str:
    try:
        return sha256_file(path)
    except OSError as error:
        raise _unreadable(path, error) from None


def _unreadable(path: Path, error: OSError) -> UserError:
    return UserError(f"The input file {path} cannot be read: {error.strerror}.")
