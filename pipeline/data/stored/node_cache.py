"""Token shards on a disk of this node, fetched once for all of its processes, within a bound of bytes.

The name of a file is the sha256 of its content. A file gets its name only when its bytes have been hashed and are on
the disk, so every process may read a file that it finds. Its modification time is computed from the hash: a file with
another time was written to since, and is fetched again. The cache has a folder of its own, and removes only files that
are named like its own. A process that reads a file while another one removes it can read on, through its descriptor.

Locks are the kernel's (flock), which end with their process however it ends. A file that is being fetched is locked by
its writer and has its full size from the start, so that the bound or a full disk shows before anything is fetched.
"""

from __future__ import annotations

import errno
import hashlib
import os
import platform
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from drover.pipeline.core.errors import UserError, is_full_disk
from drover.pipeline.core.files import flush, lock_file, publish
from drover.pipeline.data.stored.figures import Figures
from drover.pipeline.storage.outcomes import Missing

CHUNK_BYTES = 1 << 20
TRIES = 2
"""Fetches of a shard before its content counts as wrong."""
FAILURES = 3
"""Failures in a row, without a byte between them, that end a fetch; the store repeats each request itself, too."""
PAUSE_S = 1.0
"""Pause before a fetch is tried again; it doubles each time."""
POLL_S = 0.05
"""How often a process that needs a shard, or room, checks whether other processes have finished a fetch."""
RECENT_S = 60.0
"""A shard that is not needed yet does not evict one that was fetched or opened in this time."""
_OWN = re.compile(r"[0-9a-f]{64}\.arrow")
_FETCHED = re.compile(r"[0-9a-f]{64}\.[^/]+\.tmp")


class Closed(Exception):  # noqa: N818 - no error: reading ahead ends in the middle of a shard
    """The cache is closed."""


class NodeCache:
    """One process's access to the cache in a folder. Threads may share it.

    Args:
        folder: of a disk of this node; all is kept in a folder of the user's own within.
        limit: bytes that all shards in it may have.
        say: logs a message for the user.

    Attributes:
        limit: lowered where the disk has less room.
    """

    def __init__(self, folder: Path, limit: int, figures: Figures, say: Callable[[str], None]) -> None:
        self.folder, self.limit, self.figures, self.say = folder / f"drover-tokens-{os.getuid()}", limit, figures, say
        self._closed, self._number = threading.Event(), 0
        self._make_folder()

    def open(self, name: str, sha256: str, size: int, read: Callable[[int], BinaryIO], *,
             ahead: bool = False) -> int | None:
        """A descriptor, to be closed by the caller, of the shard with this hash, which is fetched if it is not there.

        Args:
            name: what to call it in errors.
            read: opens it in the store, from this byte on.
            ahead: it is not needed yet, so it evicts nothing that was fetched or opened a moment ago.

        Returns:
            None where there is no room for it.

        Raises:
            UserError: it cannot be fetched, or is not what its hash says.
        """
        if (found := self._found(sha256, size)) is not None:
            self.figures.add(hits=not ahead)
            return found
        began = time.perf_counter()
        try:
            while True:
                with self._locked():
                    if (found := self._found(sha256, size, remove=True)) is not None:  # by another process meanwhile
                        self.figures.add(hits=not ahead)
                        return found
                    fetching = self._being_fetched()
                    if sha256 not in fetching and (reserved := self._reserve(sha256, size, ahead)) is not None:
                        break
                if sha256 not in fetching and (ahead or size > self.limit or not fetching):
                    return None
                if self._closed.wait(POLL_S):  # then it is there, or there is something to remove
                    raise Closed
            return self._fetch(name, sha256, size, read, reserved)
        finally:
            if not ahead:
                self.figures.add(wait_s=time.perf_counter() - began)

    def close(self) -> None:
        """End what is being fetched."""
        self._closed.set()

    def _make_folder(self) -> None:
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            status = self.folder.lstat()
            if not self.folder.is_dir() or self.folder.is_symlink() or status.st_uid != os.getuid():
                raise UserError(f"{self.folder}, where token shards are to be kept (train.cache.folder), is not a "
                                f"folder of yours. Give another train.cache.folder.")
            with self._locked():
                self._being_fetched()
        except OSError as error:
            raise UserError(f"Token shards cannot be kept in {self.folder} (train.cache.folder): {error.strerror}. "
                            f"Give a folder on a disk of this node that can be written to and has locks.") from None

    def _found(self, sha256: str, size: int, *, remove: bool = False) -> int | None:
        """A descriptor of the file, if it is there as it was written; with `remove`, another one goes."""
        path = self._path(sha256)
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        status = os.fstat(descriptor)
        if status.st_size == size and status.st_mtime_ns == _stamp(sha256):
            os.utime(descriptor, ns=(time.time_ns(), status.st_mtime_ns))
            return descriptor
        os.close(descriptor)
        if remove:
            self.say(f"{path} was written to since it was fetched; it is fetched again")
            path.unlink(missing_ok=True)
        return None

    def _fetch(self, name: str, sha256: str, size: int, read: Callable[[int], BinaryIO], file: BinaryIO) -> int | None:
        """Fetch the shard into the file that was reserved for it, and give that its name; a descriptor of it."""
        temporary = Path(file.name)
        try:
            with file:
                for attempt in range(TRIES):
                    if (found := self._download(name, file, size, read)) == sha256:
                        break
                    if attempt + 1 < TRIES:
                        self.figures.add(retries=1)
                        self.say(f"{name} came with sha256 {found[:12]} instead of {sha256[:12]}; it is fetched again")
                else:
                    raise UserError(f"{name} is not what the stage encode committed: sha256 {sha256[:12]} -> "
                                    f"{found[:12]}. It was changed in the store, or copied from another run. Copy this "
                                    f"run's shards there again (drover copy-tokens), or give the place that has them "
                                    f"as train.tokens_from.")
                flush(file)  # before the lock is held
                os.utime(file.fileno(), ns=(time.time_ns(), _stamp(sha256)))
                descriptor = os.open(temporary, os.O_RDONLY | os.O_CLOEXEC)
                with self._locked():  # who counts what is here finds it once
                    publish(temporary, self._path(sha256))
        except BaseException as error:
            temporary.unlink(missing_ok=True)
            if isinstance(error, OSError) and is_full_disk(error):  # where room cannot be reserved
                with self._locked():
                    self._lower_limit()
                return None
            raise
        self.figures.add(fetched=1, fetched_bytes=size)
        return descriptor

    def _download(self, name: str, file: BinaryIO, size: int, read: Callable[[int], BinaryIO]) -> str:
        """Write the shard's bytes to the file; hex sha256 of them. A fetch that breaks off continues at its last
        byte."""
        digest, done, failures = hashlib.sha256(), 0, 0
        while done < size:
            before = file.seek(done)
            try:
                with read(done) as stream:
                    while chunk := stream.read(CHUNK_BYTES):
                        if self._closed.is_set():
                            raise Closed
                        file.write(chunk[:size - done])
                        digest.update(chunk)  # of what is too long, too: then the hash is another
                        done += len(chunk)
                if done < size:
                    raise UserError(f"{name} breaks off after {done:,} of {size:,} bytes.")
            except Missing:
                raise
            except UserError as error:
                failures = 1 if done > before else failures + 1
                if failures >= FAILURES:
                    raise
                self.figures.add(retries=1)
                self.say(f"fetching {name}: {error} Trying again")
                if self._closed.wait(PAUSE_S * 2 ** (failures - 1)):
                    raise Closed from None
        return digest.hexdigest()

    def _reserve(self, sha256: str, size: int, ahead: bool) -> BinaryIO | None:
        """An empty file of this size, open and locked, for which room was made; None where there is none."""
        while size <= self.limit and self._make_room(self._used() + size - self.limit, ahead):
            try:
                return self._allocate(sha256, size)
            except OSError as error:
                if not is_full_disk(error):
                    raise UserError(f"{self.folder} (train.cache.folder) cannot be written to: {error.strerror}. "
                                    f"Give another train.cache.folder.") from None
            self._lower_limit()
        return None

    def _lower_limit(self) -> None:
        """The disk has no room for more than what is there now."""
        self.limit = min(self.limit - 1, self._used())
        self.say(f"the disk of {self.folder} is full: the cache's bound is {self.limit / 1e9:.3f} GB now")

    def _allocate(self, sha256: str, size: int) -> BinaryIO:
        self._number += 1
        path = self.folder / f"{sha256}.{platform.node()}-{os.getpid()}-{id(self):x}-{self._number}.tmp"
        file = open(path, "xb", opener=_own_only)  # noqa: SIM115 - closed when the shard is fetched
        try:
            lock_file(file.fileno())
            if size and hasattr(os, "posix_fallocate"):  # macOS has none: there a full disk shows when it is written
                os.posix_fallocate(file.fileno(), 0, size)
            file.truncate(size)
        except BaseException:
            path.unlink(missing_ok=True)
            file.close()
            raise
        return file

    def _make_room(self, needed: int, ahead: bool) -> bool:
        """Evict so many bytes of shards, the least recently used first; with `ahead` only shards that were not opened a
        moment ago. Returns whether that is possible; if not, none is evicted."""
        if needed <= 0:
            return True
        until = time.time_ns() - int(RECENT_S * 1e9) if ahead else None
        victims = []
        for used, size, name in sorted((about.st_atime_ns, about.st_size, name) for name, about in self._files()
                                       if _OWN.fullmatch(name)):
            if needed > 0 and (until is None or used < until):
                victims.append(name)
                needed -= size
        if needed > 0:
            return False
        for name in victims:
            (self.folder / name).unlink(missing_ok=True)
        self.figures.add(removed=len(victims))
        return True

    def _used(self) -> int:
        """Bytes of all shards, those that are being fetched with them."""
        return sum(about.st_size for _, about in self._files())

    def _files(self) -> Iterator[tuple[str, os.stat_result]]:
        """Names of all shards, those that are being fetched with them, but for what vanishes meanwhile."""
        for entry in os.scandir(self.folder):
            if _OWN.fullmatch(entry.name) or _FETCHED.fullmatch(entry.name):
                with suppress(FileNotFoundError):  # a fetch that failed, or what was written to since, by another
                    yield entry.name, entry.stat()

    def _being_fetched(self) -> set[str]:
        """Hashes of what is being fetched now. What killed processes were fetching is removed: it counts, and may be
        what fills the disk."""
        found = set()
        for entry in list(os.scandir(self.folder)):
            if _FETCHED.fullmatch(entry.name):
                if _is_free(Path(entry.path)):
                    Path(entry.path).unlink(missing_ok=True)
                else:
                    found.add(entry.name[:64])
        return found

    def _path(self, sha256: str) -> Path:
        return self.folder / f"{sha256}.arrow"

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold the lock against all threads of all processes of this node: to look, make room, reserve and name."""
        with open(self.folder / "lock", "ab", opener=_own_only) as file:
            if not lock_file(file.fileno(), wait=True):
                raise OSError(errno.ENOLCK, "its file system has no locks")
            yield


def _own_only(path: str, flags: int) -> int:
    """Open a file that no other user may read, should it be made."""
    return os.open(path, flags, 0o600)


def _stamp(sha256: str) -> int:
    """The modification time, in ns, of a file with this content; a day before 1979, which no write gives it."""
    return int(sha256[:7], 16) * 10**9


def _is_free(path: Path) -> bool:
    """Whether nobody holds the file locked; also if it is not there."""
    try:
        with open(path, "r+b") as file:
            lock_file(file.fileno())
    except FileNotFoundError:
        pass
    except BlockingIOError:
        return False
    return True
