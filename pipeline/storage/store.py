"""A place with objects, by its URL: `s3://bucket/prefix`, `gs://`, `az://`, `file://`. Of a web server (`https://`)
single files are read: it lists and takes none.

Keys and addresses come from the environment, as for each cloud's own tools, never from a configuration. A store can be
sent to other processes: it is only a URL, and every process opens its own connections. They do not survive a fork: fork
before one is opened, as `drover.pipeline.contract.workers` does, or spawn.
"""

from __future__ import annotations

import hashlib
import io
import os
import platform
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, unquote

from drover.pipeline.core.background import ordered_map
from drover.pipeline.core.errors import UserError
from drover.pipeline.core.files import atomic_file
from drover.pipeline.storage.folders import Changed as Changed
from drover.pipeline.storage.folders import Exists as Exists
from drover.pipeline.storage.folders import Folder
from drover.pipeline.storage.folders import Missing as Missing
from drover.pipeline.storage.folders import StoredObject as StoredObject

if TYPE_CHECKING:
    from drover.pipeline.storage.clouds import Cloud

SCHEMES = ("s3", "gs", "az", "abfs", "abfss", "file")
WEB = ("https", "http")
"""Schemes of servers whose files are only read."""
BLOCK_BYTES = 8 << 20
"""Objects are read in ranges of this size, with AHEAD of them prefetched."""
AHEAD = 3
LITTLE_BYTES = 1 << 20
CHECKED = ".drover-check-"
"""Prefix of the objects that `preflight` writes; a killed one leaves its object behind."""
DELETED_AT_ONCE = 1000
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")


def is_url(text: str) -> bool:
    """Whether it is `scheme://...`, and not a path."""
    return _URL.match(text) is not None


class Store:
    """The objects under a URL. Nothing is contacted before an operation.

    An operation that fails raises UserError, with the URL, the operation and what to do: no such bucket, keys that are
    refused, a server that fails after all retries.

    Raises:
        UserError: the URL is of an unknown kind.
    """

    def __init__(self, url: str) -> None:
        scheme, mark, rest = url.partition("://")
        self.url = url.rstrip("/") if rest.strip("/") else url
        if not mark or scheme not in (*SCHEMES, *WEB):
            raise UserError(f"{url} cannot be opened. Give a URL that begins with "
                            f"{', '.join(f'{name}://' for name in SCHEMES)}.")
        bucket, _, prefix = rest.partition("/")
        if scheme == "file" and bucket not in ("", "localhost"):
            raise UserError(f"{url} names a folder of another machine, or lacks a slash: file:///{rest} is one of "
                            f"this machine.")
        if scheme != "file" and not bucket:
            raise UserError(f"{url} names no bucket. Give it as {scheme}://bucket/prefix.")
        self._root = f"{scheme}://{bucket}" if scheme != "file" else "file://"
        self.is_web = scheme in WEB
        self._is_quoted = scheme in ("file", *WEB)
        self._prefix = self.path_in(prefix).strip("/")

    def path_in(self, part: str) -> str:
        """An object's path as a part of a URL names it."""
        return unquote(part) if self._is_quoted else part

    def url_of(self, path: str) -> str:
        """The URL of an object."""
        key = self._key(path)
        return f"{self._root}/{quote(key) if self._is_quoted else key}"

    def list(self, prefix: str = "") -> Iterator[StoredObject]:
        """All objects whose path begins with `prefix` and a slash, sorted by path. Empty objects that represent folders
        are left out."""
        cut = len(self._prefix) + 1 if self._prefix else 0
        entries = sorted(self._backend().list(self._key(prefix)), key=lambda entry: entry.path)
        empty = {entry.path for entry in entries if not entry.size}
        folders = {str(parent) for entry in entries for parent in PurePosixPath(entry.path).parents} & empty \
            if empty else empty
        for entry in entries:
            if entry.path not in folders and len(entry.path) > cut:
                yield replace(entry, path=entry.path[cut:])

    def head(self, path: str) -> StoredObject | None:
        """An object's entry; None if it is not there."""
        entry = self._backend().head(self._key(path))
        return None if entry is None else replace(entry, path=path)

    def entry(self, path: str) -> StoredObject:
        """An object's entry. Raises Missing if it is not there."""
        if (entry := self.head(path)) is None:
            raise Missing(f"{self.url_of(path)} is not there. Correct the URL, or put the object there.")
        return entry

    def read(self, path: str, start: int = 0, stop: int | None = None, *, etag: str = "") -> bytes:
        """The bytes [start, stop) of an object, or those from `start` to its end.

        etag: the object must have this ETag.

        Raises:
            Missing: it is not there.
            Changed: its ETag is another.
            UserError: it has fewer bytes, among other reasons.
        """
        if stop is not None and stop - start > 2 * BLOCK_BYTES:
            return b"".join(self._blocks(path, start, stop, etag))
        if stop is not None and stop <= start:
            return b""
        data, entry = self._backend().read(self._key(path), start, stop, etag)
        if etag and entry.etag != etag:
            raise Changed(f"{self.url_of(path)} is not what it was: its ETag is {entry.etag}, not {etag}.")
        meant = (entry.size if stop is None else stop) - start
        if len(data) != meant:
            raise UserError(f"{self.url_of(path)}: asked for {meant:,} bytes from {start:,} on, got {len(data):,} "
                            f"(the object has {entry.size:,}). Look whether it is whole.")
        return data

    def stream(self, path: str, start: int = 0, *, entry: StoredObject | None = None, until: int | None = None,
               known: bytes = b"") -> io.BufferedReader:
        """The bytes of an object from `start` on, read in order with a few blocks in memory.

        Args:
            entry: the object's entry from `list`; another object in its place is refused.
            until: blocks up to here are prefetched; later ones are small and read when needed.
            known: bytes at `start` that were read already.

        Raises:
            Missing: it is not there.
            Changed: it is replaced during reading.
        """
        entry = entry or self.entry(path)
        until = entry.size if until is None else min(until, entry.size)
        return io.BufferedReader(BlockStream(self._in_order(path, start, entry, until, known)), LITTLE_BYTES)

    def put(self, path: str, data: bytes | Path, *, only_new: bool = False) -> StoredObject:
        """Write an object, complete or not at all; a large file in parts, unless the write is conditional.

        Args:
            data: bytes, or the file that has them.
            only_new: only if there is none.

        Raises:
            Exists: with `only_new`, it is there.
            UserError: the stored size differs, among other reasons. If the answer to a conditional write is lost, its
                outcome is unknown: look at what is there.
        """
        size = data.stat().st_size if isinstance(data, Path) else len(data)
        etag = self._backend().put(self._key(path), data, only_new)
        entry = self.head(path)
        if entry is None or (entry.size != size and etag in ("", entry.etag)):
            there = "nothing is there" if entry is None else f"{entry.size:,} are there"
            raise UserError(f"{self.url_of(path)}: {size:,} bytes were written, and {there}. The server does not store "
                            f"what it receives; use another one.")
        return replace(entry, etag=etag or entry.etag, size=size)

    def fetch(self, path: str, to: Path) -> str:
        """Download an object to a file, which appears complete or not at all.

        Returns:
            sha256 of what was written.

        Raises:
            Missing: it is not there.
            Changed: it was replaced during reading.
        """
        entry = self.entry(path)
        digest = hashlib.sha256()
        with atomic_file(to) as file:
            for block in self._blocks(path, 0, entry.size, entry.etag):
                digest.update(block)
                file.write(block)
        return digest.hexdigest()

    def delete(self, paths: Iterable[str]) -> None:
        """Delete objects; a missing one is no error."""
        keys = map(self._key, paths)
        while some := list(islice(keys, DELETED_AT_ONCE)):
            self._backend().delete(some)

    def _in_order(self, path: str, start: int, entry: StoredObject, until: int, known: bytes) -> Iterator[bytes]:
        if known:
            yield known
        at = start + len(known)
        yield from self._blocks(path, at, until, entry.etag)
        for place in range(max(at, until), entry.size, LITTLE_BYTES):
            yield self.read(path, place, min(place + LITTLE_BYTES, entry.size), etag=entry.etag)

    def _blocks(self, path: str, start: int, stop: int, etag: str) -> Iterator[bytes]:
        """The bytes [start, stop) in blocks, a few of which are prefetched."""
        yield from ordered_map(lambda at: self.read(path, at, min(at + BLOCK_BYTES, stop), etag=etag),
                               range(start, stop, BLOCK_BYTES), AHEAD)

    def _backend(self) -> Folder | Cloud:
        if self._root == "file://":
            return Folder()
        from drover.pipeline.storage.clouds import Cloud
        return Cloud(self._root)

    def _key(self, path: str) -> str:
        return "/".join(part for part in (self._prefix, path.strip("/")) if part)


class BlockStream(io.RawIOBase):
    """The blocks of bytes that a generator makes, none of them empty, as a stream. file: what they are made of, which
    is closed with it."""

    def __init__(self, blocks: Iterator[bytes], file: Any = None) -> None:
        self._blocks = blocks
        self._file = file
        self._rest = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        self._rest = self._rest or memoryview(next(self._blocks, b""))
        count = min(len(buffer), len(self._rest))
        buffer[:count] = self._rest[:count]
        self._rest = self._rest[count:]
        return count

    def close(self) -> None:
        if not self.closed:
            self._blocks.close()  # type: ignore[attr-defined]
            if self._file is not None:
                self._file.close()
        super().close()


def preflight(store: Store) -> None:
    """Test a store: write a small object, compare it, check that a second write is refused, and delete it. Some servers
    store the framing of an upload as content, or ignore the condition of a write. A range other than the requested one
    is refused at each read.

    Raises:
        UserError: what the store does wrong.
    """
    path = f"{CHECKED}{platform.node()}-{os.getpid()}-{os.urandom(6).hex()}"
    data = os.urandom(70_001)
    store.put(path, data)
    try:
        if store.read(path) != data:
            raise _unfit(store, "a small object was read back with other content")
        with suppress(Exists):
            store.put(path, b"other", only_new=True)
            raise _unfit(store, "an object was overwritten by a write that should succeed only if new")
    finally:
        store.delete([path])


def _unfit(store: Store, what: str) -> UserError:
    return UserError(f"{store.url}: {what}. Nothing can be kept there safely; use another server.")
