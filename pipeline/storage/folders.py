"""What operations on objects give; and `file://`, a folder as an object store, so that what runs on a cluster's object
store also runs on a disk.

Objects appear complete and survive a power cut. A conditional write creates a hard link, which fails if the object
exists.
"""

from __future__ import annotations

import io
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from drover.pipeline.core.errors import UserError
from drover.pipeline.core.files import atomic_file, sync
from drover.pipeline.core.folders import folders_below

_TEMPORARY = re.compile(r"\.[^/]*-[0-9]+\.tmp$")
"""Names that `atomic_file` gives to unfinished files."""
_COPY = 1 << 20


class Missing(UserError):  # noqa: N818 - the names say what is so
    """There is no such object."""


class Exists(UserError):  # noqa: N818
    """It was to be written only if new, but exists."""


class Changed(UserError):  # noqa: N818
    """The object has changed: its ETag is another."""


@dataclass(frozen=True)
class StoredObject:
    """An object.

    Attributes:
        path: relative to the store's prefix.
        size: in bytes.
        etag: the store's identifier of this content; empty if it gives none.
        modified: seconds since 1970.
    """

    path: str
    size: int
    etag: str
    modified: float


class Folder:
    """The disk, as a backend of `drover.pipeline.storage.store.Store`: keys are absolute paths without the first /."""

    def list(self, prefix: str) -> list[StoredObject]:
        """All files below a folder."""
        with _explained(f"/{prefix}", "list"):
            return list(self._walk(prefix))

    def _walk(self, prefix: str) -> Iterator[StoredObject]:
        def refuse(error: OSError) -> None:
            if not isinstance(error, FileNotFoundError):
                raise error
        place = Path(f"/{prefix}")
        for folder in folders_below([str(place)], place.resolve().parents, hidden=True, refuse=refuse):
            for name in os.listdir(folder):  # noqa: PTH208 - a million names
                key = os.path.join(folder, name)[1:]  # noqa: PTH118 - a million names
                if not _TEMPORARY.search(name) and (entry := self.head(key)) is not None:
                    yield entry

    def head(self, key: str) -> StoredObject | None:
        """One file."""
        path = Path(f"/{key}")
        try:
            with _explained(f"/{key}", "read"):
                return _entry(key, path.stat()) if path.is_file() else None
        except Missing:
            return None

    def read(self, key: str, start: int, stop: int | None, etag: str) -> tuple[bytes, StoredObject]:
        """The bytes [start, stop) as far as they exist, and the file's entry."""
        with _explained(f"/{key}", "read"), open(f"/{key}", "rb") as file:
            entry = _entry(key, os.fstat(file.fileno()))
            if etag and entry.etag != etag:
                raise Changed(f"file:///{key} has changed. Let no process write to it while it is read.")
            file.seek(start)
            return file.read(-1 if stop is None else stop - start), entry

    def put(self, key: str, data: bytes | Path, only_new: bool) -> str:
        """Write a file; its ETag."""
        path = Path(f"/{key}")
        new = path.with_name(f"{path.name}.new-{os.urandom(4).hex()}-{os.getpid()}.tmp")
        with _explained(f"/{key}", "write"):
            with open(data, "rb") if isinstance(data, Path) else io.BytesIO(data) as content, \
                    atomic_file(new if only_new else path) as file:
                shutil.copyfileobj(content, file, _COPY)
            if only_new:
                try:
                    os.link(new, path)
                except FileExistsError:
                    raise Exists(f"file://{path} is there already.") from None
                finally:
                    new.unlink(missing_ok=True)
                sync(path.parent)
            return _entry(key, path.stat()).etag

    def delete(self, keys: Sequence[str]) -> None:
        """Remove files; a missing one is no error."""
        for key in keys:
            with _explained(f"/{key}", "delete"):
                Path(f"/{key}").unlink(missing_ok=True)


@contextmanager
def _explained(path: str, operation: str) -> Iterator[None]:
    """Turn errors into UserError."""
    try:
        yield
    except FileNotFoundError:
        raise Missing(f"file://{path} is not there. Correct the URL, or put the file there.") from None
    except OSError as error:
        raise UserError(f"file://{path}: {operation} failed: {error.strerror or error}. Give a place where this user "
                        f"has the permission, and run it again.") from None


def _entry(key: str, about: os.stat_result) -> StoredObject:
    return StoredObject(key, about.st_size, f"{about.st_ino:x}-{about.st_mtime_ns:x}-{about.st_size:x}", about.st_mtime)
