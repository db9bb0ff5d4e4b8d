"""The list of the files that a stage's units read: what is known of a begun stage's input before it has been read.

The units hash what they read themselves (`unit_files` of `Stage.functions`), so that no file is read twice. Until all
have, name, size and time of each file stand for its content. Which units are done again after a change is decided by
their own keys.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from drover.pipeline.core.errors import UserError
from drover.pipeline.core.files import atomic_file, changed_ns, sha256_file, sha256_json
from drover.pipeline.core.ordered_map import ordered_map
from drover.pipeline.storage.object_files import InputFile

LISTING = "listing.jsonl"
"""In the folder of a stage that is begun: a line [name, bytes, mtime_ns] for each file that its units read."""
Record = dict[str, Any]


def listed_files(files: Sequence[tuple[str, InputFile]]) -> list[Record]:
    """Name, absolute path, bytes and mtime_ns of files, in their order; UserError if one is not there."""
    def record(item: tuple[str, InputFile]) -> Record:
        name, path = item
        try:
            stat = path.stat()
        except OSError as error:
            raise UserError(f"The input file {path} cannot be read: {error.strerror}.") from None
        return {"name": name, "path": str(path.absolute()), "bytes": stat.st_size, "mtime_ns": changed_ns(stat)}
    return list(ordered_map(record, files, batch=512))


def hashed_now(listing: Sequence[Record]) -> list[Record]:
    """The records with the sha256 of each file, for a stage whose units did not hash what they read."""
    return [{**record, "sha256": sha256_file(Path(record["path"]))} for record in listing]


def listing_digest(listing: Sequence[Record]) -> str:
    """What stands for the files in the identity of a stage that is begun."""
    return sha256_json([_line(record) for record in listing])


def write_listing(folder: Path, listing: Sequence[Record]) -> None:
    """Keep it in a stage's folder."""
    with atomic_file(folder / LISTING, "w") as file:
        file.writelines(json.dumps(_line(record)) + "\n" for record in listing)


def changed_files(folder: Path, listing: Sequence[Record]) -> list[str]:
    """Names of the files that are new, gone, or of another size or time than when the stage in `folder` was begun."""
    before: dict[str, list[Any]] = {}
    try:
        with open(folder / LISTING, encoding="utf-8") as file:
            before = {line[0]: line for line in map(json.loads, file)}
    except (OSError, ValueError, IndexError, TypeError):  # not there or torn: then every file is new
        pass
    now = {record["name"]: _line(record) for record in listing}
    return sorted(name for name in before.keys() | now.keys() if before.get(name) != now.get(name))


def refuse_unread(listing: Sequence[Record], read: Sequence[Record], stage: str) -> None:
    """UserError if what units read of the files is not what was listed when they began."""
    known = {str(record["name"]): _line(record) for record in read}
    other = [str(record["name"]) for record in listing if known.pop(record["name"], None) != _line(record)]
    if other := [*other, *known]:
        raise UserError(f"{len(other):,} input files were changed while {stage} was reading them "
                        f"({', '.join(other[:3])}{' ...' if len(other) > 3 else ''}), so it is not committed. Run it "
                        f"again: it reads what is there now.")


def _line(record: Record) -> list[Any]:
    return [record["name"], record["bytes"], record["mtime_ns"]]
