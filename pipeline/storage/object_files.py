"""Objects as input files: found by URLs with wildcards, identified by the store's ETags."""

from __future__ import annotations

import glob
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from io import BufferedReader
from itertools import takewhile
from pathlib import Path, PurePosixPath

from drover.pipeline.core.errors import UserError
from drover.pipeline.core.files import opened
from drover.pipeline.storage.store import Store, StoredObject, is_url


@dataclass(frozen=True)
class ObjectStat:
    """The fields of `os.stat` that an object has."""

    st_size: int
    st_mtime_ns: int


@dataclass(frozen=True, order=True)
class ObjectFile:
    """An object from a listing, in place of a file's path. It is read only while its ETag is the same: otherwise
    `Changed` is raised, or `Missing` if it is gone."""

    url: str
    size: int
    etag: str
    modified: float = 0.0

    def __str__(self) -> str:
        return self.url

    @property
    def place(self) -> PurePosixPath:
        """The bucket and the object's name in it."""
        return PurePosixPath(self.url.partition("://")[2])

    @property
    def name(self) -> str:
        return self.place.name

    def absolute(self) -> ObjectFile:
        return self

    def is_file(self) -> bool:
        return True

    def stat(self) -> ObjectStat:
        """Its size, and in place of a time the number of its content."""
        return ObjectStat(self.size, content_number(self.etag, self.modified))

    @cached_property
    def _store(self) -> Store:
        return Store(self.url.rpartition("/")[0])

    @property
    def _path(self) -> str:
        return self._store.path_in(self.url.rpartition("/")[2])

    @cached_property
    def beginning(self) -> bytes:
        """The first bytes; all of a small object. Downloaded once."""
        return self.read(0, min(self.size, BEGINNING_BYTES))

    def read(self, start: int, stop: int) -> bytes:
        """The bytes [start, stop)."""
        return self._store.read(self._path, start, stop, etag=self.etag)

    def open(self, position: int = 0, until: int | None = None) -> BufferedReader:
        """The bytes from `position` on; those before `until` are prefetched."""
        entry = StoredObject(self._path, self.size, self.etag, self.modified)
        first = self.beginning if position < min(self.size, BEGINNING_BYTES) else b""
        return self._store.stream(self._path, position, entry=entry, until=until, known=first[position:])

    def head(self) -> StoredObject:
        """The store's present entry of the object."""
        return self._store.entry(self._path)


InputFile = Path | ObjectFile
"""An input of a stage: a local file or an object."""


def content_number(etag: str, modified: float) -> int:
    """A number that changes with an object's ETag. It takes the place of a file's modification time in nanoseconds. For
    a store without ETags it is that time."""
    if not etag:
        return int(modified * 1e9)
    return int.from_bytes(hashlib.sha256(etag.encode()).digest()[:6], "big")


BEGINNING_BYTES = 1 << 20


def open_input(path: str) -> BufferedReader:
    """A file or an object by its path or URL, to be read in order."""
    if is_url(path):
        folder, _, name = path.rpartition("/")
        store = Store(folder)
        return store.stream(store.path_in(name))
    return opened(path)


def content_hash(path: str) -> str:
    """The sha256 of a file, or of an object by its URL."""
    with open_input(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def find(pattern: str) -> list[ObjectFile]:
    """The objects that a URL names: one object, all under a prefix, or those that match wildcards. As for files, * and
    ? stay within a folder, ** crosses folders, and hidden names need a pattern that begins with a dot. A web server's
    address names one file.

    Raises:
        UserError: there are none, or the store cannot be read.
    """
    scheme, _, place = pattern.partition("://")
    root, _, written = place.partition("/")
    bucket = Store(f"{scheme}://{root}")
    key = bucket.path_in(written)
    if bucket.is_web:
        return [_web_file(pattern, bucket, key)]
    parts = key.strip("/").split("/")
    if glob.has_magic(key):
        folder = "/".join(takewhile(lambda part: not glob.has_magic(part), parts))
        entries = list(bucket.list(folder))
        result = [entry for entry in entries if entry.path == key] or \
            [entry for entry in entries if matches(entry.path.split("/"), parts)]
        why = f"no object matches (looked at {len(entries):,} under {bucket.url_of(folder)})"
    else:
        one = bucket.head(key) if key and not key.endswith("/") else None
        result = [one] if one is not None else [
            entry for entry in bucket.list(key) if matches(entry.path.split("/"), [*filter(None, parts), "**"])]
        why = "there is no object, and none under it"
    if not result:
        raise UserError(f"{pattern}: {why}. Correct the URL.")
    return [ObjectFile(bucket.url_of(entry.path), entry.size, entry.etag, entry.modified) for entry in result]


def _web_file(address: str, server: Store, path: str) -> ObjectFile:
    """The file at an address."""
    if glob.has_magic(path):
        raise UserError(f"{address}: a web server lists no files, so an address names one of them, without ?, * and [. "
                        f"Give the address of each file.")
    entry = server.entry(path)
    if not entry.etag:
        raise UserError(f"{address}: the server sends no ETag, so nobody would see that the file changes while it is "
                        f"read. Download it, and give its path.")
    return ObjectFile(server.url_of(path), entry.size, entry.etag, entry.modified)


def matches(path: Sequence[str], pattern: Sequence[str]) -> bool:
    """Whether an object's path, in parts, matches a pattern in parts, like `glob.glob(recursive=True)`."""
    if not pattern:
        return not path
    if not path:
        return False
    if list(pattern) == ["**"]:
        return not any(part.startswith(".") for part in path)
    if pattern[0] == "**":
        return matches(path, pattern[1:]) or (not path[0].startswith(".") and matches(path[1:], pattern))
    hidden = path[0].startswith(".") and glob.has_magic(pattern[0]) and not pattern[0].startswith(".")
    return not hidden and fnmatchcase(path[0], pattern[0]) and matches(path[1:], pattern[1:])

