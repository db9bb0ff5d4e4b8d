"""Units of a stage's work, and the records of those that are finished."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drover.pipeline.contract.parts import PARTS, UNITS
from drover.pipeline.contract.threads import in_threads
from drover.pipeline.files import SEAL, atomic_file, sha256_json, write_sealed

NUMBERED = re.compile(r"[0-9]{5,}$")
MANY = 1000
"""Records that are gathered in one file."""
Record = dict[str, Any]


@dataclass(frozen=True)
class Unit:
    """A piece of a stage's work that is done or not done: a readable name and what the worker needs for it."""

    name: str
    payload: Any


def unit_keys(identity: Mapping[str, Any], phase: str, units: Iterable[Unit]) -> dict[str, str]:
    """What the record of each unit must say to be taken: a hash of the stage's identity, the phase and the payload."""
    before = sha256_json([dict(identity), phase]).encode()  # once: it may name a million files
    return {unit.name: hashlib.sha256(before + _canonical(unit.payload)).hexdigest() for unit in units}


class UnitRecords:
    """The records of one phase's finished units, in a stage's folder.

    Each is a file of its own under `units/<phase>/`, which is the unit's commit. Once all are there, and many,
    `units/<phase>.jsonl` holds them as well, a line each in the order of the units, and is what later starts read; it
    is removed before one of its units is done again.
    """

    def __init__(self, stage_folder: Path, phase: str, say: Callable[[str], None]) -> None:
        self.stage_folder, self.say = stage_folder, say
        self.folder = stage_folder / UNITS / phase
        self.whole = stage_folder / UNITS / f"{phase}.jsonl"

    def path(self, name: str) -> Path:
        """Where the record of a unit is. The folder of a numbered unit (five digits or more) is its name without the
        last three: so none holds more than a thousand of them."""
        return (self.folder / name[:-3] if NUMBERED.search(name) else self.folder) / f"{name}.json"

    def write(self, name: str, key: str, record: Record) -> None:
        """Commit a unit."""
        write_sealed(self.path(name), {"key": key, **record})

    def found(self, keys: Mapping[str, str], *, outputs: bool = True) -> dict[str, Record]:
        """The records of those units that are finished under these keys.

        outputs: only those whose outputs are there, in the size that was recorded; otherwise `units/<phase>.jsonl` is
            believed, whose writer has looked.
        """
        gathered = self._gathered(keys)
        found = self._sound(gathered) if outputs else gathered
        if len(found) < len(gathered):
            self.whole.unlink(missing_ok=True)
        if len(gathered) < len(keys):
            own = self._single({name: key for name, key in keys.items() if name not in gathered})
            found = {**found, **self._sound(own)}
        return found

    def gather(self, keys: Mapping[str, str], records: Mapping[str, Record]) -> None:
        """Write all units' records, which are all finished, as one file, where they are many and it is not there.

        Where orjson, which reads it, does not read one of them as Python's own parser does, there is none.
        """
        if len(keys) < MANY or self.is_gathered():
            return
        import orjson
        with suppress(orjson.JSONDecodeError), atomic_file(self.whole) as file:
            for name, key in keys.items():
                line = json.dumps({"unit": name, "key": key, **records[name]}).encode()
                if orjson.loads(line) != json.loads(line):  # of whole numbers beyond 64 bits it makes others
                    raise orjson.JSONDecodeError("not read alike", "", 0)
                file.write(line + b"\n")

    def is_gathered(self) -> bool:
        """Whether there is the one file with all records."""
        return self.whole.is_file()

    def _gathered(self, keys: Mapping[str, str]) -> dict[str, Record]:
        """What the one file with all records has under these keys."""
        import orjson
        found: dict[str, Record] = {}
        try:
            with open(self.whole, "rb") as file:
                for line in file:
                    record = orjson.loads(line)
                    name, key = record.pop("unit"), record.pop("key")
                    if keys.get(name) == key:
                        found[name] = record
        except (OSError, ValueError, KeyError, AttributeError):  # not there, or damaged: each has its own file
            return {}
        return found

    def _single(self, keys: Mapping[str, str]) -> dict[str, Record]:
        """What the units' own files have under these keys."""
        there = ((entry.name[:-5], entry.path) for entry in _json_files(self.folder))
        found: dict[str, Record] = {}
        for name, record in in_threads(lambda item: (item[0], _read(item[1])),
                                        ((name, path) for name, path in there if name in keys)):
            if record is not None and record.pop("key", None) == keys[name]:
                found[name] = record
        return found

    def _sound(self, records: dict[str, Record]) -> dict[str, Record]:
        """Those whose outputs are there in their size."""
        sizes = ((name, self.stage_folder / output["path"], output["bytes"]) for name, record in records.items()
                 for output in record.get("outputs", []))
        lost = {name: path for (name, path, size), there in
                in_threads(lambda item: (item, _size(item[1]) == item[2]), sizes) if not there}
        for path in lost.values():
            self.say(f"{path} is missing or cut: making it again")
        return {name: record for name, record in records.items() if name not in lost} if lost else records


def finished_units(stage_folder: Path) -> int:
    """How many units of all phases the stage in a folder has records of."""
    return sum(1 for entry in _json_files(stage_folder / UNITS) if Path(entry.path).parent != stage_folder / PARTS)


def _canonical(payload: Any) -> bytes:
    """The payload as JSON, equal for equal ones."""
    import orjson
    try:
        return orjson.dumps(payload, option=orjson.OPT_SORT_KEYS)
    except TypeError:  # large numbers, keys that are no text, the names of files that are not UTF-8
        return json.dumps(payload, sort_keys=True, separators=(",", ":")).encode()


def _json_files(folder: Path) -> Iterator[os.DirEntry[str]]:
    """The files *.json in a folder and the folders in it."""
    try:
        with os.scandir(folder) as entries:
            inside = list(entries)
    except FileNotFoundError:
        return
    for entry in inside:
        if entry.name.endswith(".json"):
            yield entry
        elif entry.is_dir():
            yield from _json_files(Path(entry.path))


def _read(path: str) -> Record | None:
    """A unit's record; None if it is torn, or gone meanwhile."""
    try:
        with open(path, encoding="utf-8") as file:
            record = json.load(file)
    except (OSError, ValueError):
        return None
    if not isinstance(record, dict):
        return None
    record.pop(SEAL, None)
    return record


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except OSError:
        return None
