"""Files that appear whole or not at all: written as `.tmp`, fsynced, renamed."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any


@contextmanager
def atomic_file(path: Path, mode: str = "wb") -> Iterator[IO[Any]]:
    """Open a temporary file beside `path`; on success fsync it and rename it to `path`.

    The temporary name carries the process id, so an orphan of a killed run cannot write into our file.
    On any error the temporary file is removed and `path` is left as it was.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, mode, encoding=None if "b" in mode else "utf-8") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync(path.parent)


def sync(path: Path) -> None:
    """Make a file's content, or the names in a folder, survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_json(path: Path, value: Any) -> None:
    """Write `value` as indented JSON, atomically."""
    with atomic_file(path, "w") as file:
        json.dump(value, file, indent=1, ensure_ascii=False)
        file.write("\n")


def write_text(path: Path, text: str) -> None:
    """Write text as UTF-8, atomically."""
    with atomic_file(path, "w") as file:
        file.write(text)


def read_json(path: Path) -> Any:
    """The value of a JSON file; raises FileNotFoundError or json.JSONDecodeError."""
    with open(path, encoding="utf-8") as file:
        return json.load(file)


def sha256_file(path: Path) -> str:
    """Hex sha256 of a file's bytes."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sha256_json(value: Any) -> str:
    """Hex sha256 of a JSON value in canonical form (sorted keys, no spaces)."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()


def output_record(folder: Path, path: Path, **counts: Any) -> dict[str, Any]:
    """What a manifest says of one output file: path inside the stage's folder, bytes, sha256, counts.

    The file is read back from where it was written: the hash is of what a reader will see.
    """
    return {"path": path.relative_to(folder).as_posix(), "bytes": path.stat().st_size,
            "sha256": sha256_file(path), **counts}


def remove_temporary(folder: Path) -> int:
    """Delete what killed writers left behind (`*.tmp`) under `folder`; returns how many files went."""
    leftovers = [path for path in folder.rglob("*.tmp") if path.is_file()] if folder.is_dir() else []
    for path in leftovers:
        path.unlink(missing_ok=True)
    return len(leftovers)
