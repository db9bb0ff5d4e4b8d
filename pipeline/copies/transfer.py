"""Files to an object store and back, several at a time, each compared with what is known of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import Any

from drover.pipeline.errors import UserError
from drover.pipeline.files import sha256_file
from drover.pipeline.stores.store import Missing, Store

AT_ONCE = 4
"""Files that a process sends or fetches at the same time; a large one is sent in several parts at once anyway."""
Record = Mapping[str, Any]
"""Of a file: path, bytes, sha256."""


class DamagedCopyError(UserError):
    """What lies in the store is not what was put there."""


def send(store: Store, folder: Path, prefix: str, records: Iterable[Record]) -> int:
    """Put files of `folder` into the store, below `prefix`; returns their bytes.

    Args:
        records: of the files, path relative to `folder` and to `prefix`.

    Raises:
        UserError: a file is not what its record says (then nothing of it is put), or the store does not take it.
    """
    return sum(_each(lambda record: _send(store, folder / record["path"], f"{prefix}{record['path']}", record),
                     list(records)))


def _send(store: Store, file: Path, path: str, record: Record) -> int:
    # What flipped on the disk since it was written must not become the copy that is to replace it one day.
    if file.stat().st_size != record["bytes"] or sha256_file(file) != record["sha256"]:
        raise UserError(f"{file} is not what was written, so it is not copied to {store.url}. Check the disk.")
    entry = store.put(path, file)
    if entry.size != record["bytes"]:
        raise UserError(f"{store.url}/{path} has {entry.size} bytes after it was put, instead of {record['bytes']}: "
                        f"the store does not keep what it is given.")
    return entry.size


def fetch(store: Store, prefix: str, folder: Path, records: Iterable[Record]) -> int:
    """Fetch objects below `prefix` into `folder`, each whole or not at all; returns their bytes.

    Raises:
        DamagedCopyError: one is missing, or is not what its record says.
        UserError, OSError: the store cannot be read, or the disk not be written.
    """
    return sum(_each(lambda record: _fetch(store, f"{prefix}{record['path']}", folder / record["path"], record),
                     list(records)))


def _fetch(store: Store, path: str, file: Path, record: Record) -> int:
    if (inside := PurePosixPath(record["path"])).is_absolute() or ".." in inside.parts:
        raise DamagedCopyError(f"{store.url} names a file outside of its folder, {record['path']}")
    file.parent.mkdir(parents=True, exist_ok=True)
    try:
        digest = store.fetch(path, file)
    except Missing:
        raise DamagedCopyError(f"{store.url}/{path} is missing") from None
    size = file.stat().st_size
    if size != record["bytes"]:
        raise DamagedCopyError(f"{store.url}/{path} has {size} bytes instead of {record['bytes']}")
    if digest != record["sha256"]:
        raise DamagedCopyError(f"{store.url}/{path} has other content than was put there")
    return size


def _each(action: Callable[[Record], int], records: Sequence[Record]) -> list[int]:
    """What `action` gives for each record. Of several failures the first record's is raised, once none is at work."""
    if len(records) < 2:
        return [action(record) for record in records]
    with ThreadPoolExecutor(min(AT_ONCE, len(records)), "copy") as pool:
        return list(pool.map(action, records))
