"""Token shards of an object store as training reads them: through the node's cache, or part by part.

If all shards fit into the cache, they are fetched whole and compared with the hashes of encode's manifest. Otherwise a
global shuffle would fetch a shard for nearly every sample, so only the parts that samples need are fetched. No hash can
verify a part. Each request names the ETag that the object had when training began, and the object's size is compared
with the manifest.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from drover.pipeline.core.errors import UserError
from drover.pipeline.data.shard_table import ShardTable
from drover.pipeline.data.stored.figures import Figures
from drover.pipeline.data.stored.node_cache import NodeCache
from drover.pipeline.data.stored.ranges import RangeMemory
from drover.pipeline.data.token_shards import Descriptor, TokenShard
from drover.pipeline.storage.outcomes import Changed, Entry, Missing
from drover.pipeline.storage.store import Store

MEMORY_BYTES = 1 << 28
"""For parts of shards that were read ahead."""
FIX = "Copy the run's shards there again (drover copy-tokens), or give another train.tokens_from."
TRIES = 3
"""Requests for a part of a shard; the store repeats each request itself, too."""
PAUSE_S = 1.0


@dataclass(frozen=True)
class Settings:
    """How shards are read.

    Attributes:
        url: where they are. folder, limit: of the node's cache, and the bytes that it may have.
        whole: whether shards are fetched whole; otherwise only parts are read.
    """

    url: str
    folder: Path
    limit: int
    whole: bool


class StoredTokens:
    """One process's reader. Threads may share it.

    Args:
        entries: of each row of the table the ETag that the store had when training began; empty where it has none.
        say: logs a message for the user.

    Attributes:
        figures: what it took.
    """

    def __init__(self, settings: Settings, table: ShardTable, etags: list[str], say: Callable[[str], None]) -> None:
        self.settings, self.table, self.etags, self.say = settings, table, etags, say
        self.store, self.figures = Store(settings.url), Figures()
        self._here, self._shards = threading.local(), weakref.WeakSet[StoredShard]()
        self._lock, self._told = threading.Lock(), set[str]()
        self._cache: NodeCache | None = None
        self._memory = RangeMemory(MEMORY_BYTES)

    def __call__(self, row: int, record: dict[str, Any], whole: int) -> StoredShard:
        """The shard in a row of the table (`drover.pipeline.data.shard_table.Opener`)."""
        shard = StoredShard(self, row, record, whole)
        with self._lock:
            self._shards.add(shard)
        return shard

    @property
    def cache(self) -> NodeCache:
        """This process's access to the node's cache, made on first use."""
        with self._lock:
            if self._cache is None:
                self._cache = NodeCache(self.settings.folder, self.settings.limit, self.figures, self.say)
            return self._cache

    @contextmanager
    def reading_ahead(self) -> Iterator[None]:
        """Within, this thread reads ahead: its waiting time is not counted, and it evicts nothing that is needed
        soon."""
        self._here.ahead = True
        try:
            yield
        finally:
            self._here.ahead = False

    @property
    def _ahead(self) -> bool:
        return getattr(self._here, "ahead", False)

    def descriptor(self, row: int) -> Descriptor | None:
        """An open file with the whole shard; None where only parts are read, as there is no room for it."""
        if not self.settings.whole:
            return None
        record = self.table.record(row)
        cache, size = self.cache, record["bytes"]
        number = cache.open(self.name(row), record["sha256"], size, lambda start: self._stream(row, start),
                            ahead=self._ahead)
        if number is None and not self._ahead:
            self._say_once(f"{cache.folder} has no room for a shard of {size / 1e9:.3f} GB (the cache's bound is "
                           f"{cache.limit / 1e9:.3f} GB, its disk has {_free(cache.folder) / 1e9:.3f} GB left): parts "
                           f"of such shards are read from {self.settings.url}", about="room")
        return None if number is None else Descriptor(number)

    def read(self, row: int, start: int, stop: int) -> bytes:
        """Bytes of a shard's object, from memory if they were read ahead."""
        began = time.perf_counter()
        try:
            return self._memory.read((row, start, stop), lambda: self._read(row, start, stop))
        finally:
            if not self._ahead:
                self.figures.add(wait_s=time.perf_counter() - began)

    def let_go(self) -> None:
        """Close files that were removed from the cache: until then, they take room on the disk."""
        with self._lock:
            shards = list(self._shards)
        for shard in shards:
            shard.let_go()

    def name(self, row: int) -> str:
        """What a shard is called in errors."""
        return self.store.url_of(self.table.paths[row])

    def close(self) -> None:
        """Fetch nothing more."""
        with self._lock:
            if self._cache is not None:
                self._cache.close()

    def _stream(self, row: int, start: int) -> BinaryIO:
        size = int(self.table.record(row)["bytes"])
        return self.store.stream(self.table.paths[row], start, entry=Entry(self.table.paths[row], size, "", 0.0))

    def _read(self, row: int, start: int, stop: int) -> bytes:
        for left in reversed(range(TRIES)):
            try:
                data = self.store.read(self.table.paths[row], start, stop, etag=self.etags[row])
                self.figures.add(ranges=1, range_bytes=len(data))
                return data
            except Changed:
                raise UserError(f"{self.name(row)} was changed in the store since this start of training began. "
                                f"{FIX}") from None
            except Missing:
                raise UserError(f"{self.name(row)} is not in the store any more. {FIX}") from None
            except UserError as error:
                if not left:
                    raise
                self.figures.add(retries=1)
                self._say_once(f"reading a part of {self.name(row)}: {error} Trying again")
                time.sleep(PAUSE_S)
        raise AssertionError("unreachable")

    def _say_once(self, text: str, about: str = "") -> None:
        """about: what the text is about, if it has numbers that change from one time to the next."""
        with self._lock:
            new = (about or text) not in self._told
            self._told.add(about or text)
        if new:
            self.say(text)


class StoredShard(TokenShard):
    """A token shard whose file is in an object store."""

    def __init__(self, tokens: StoredTokens, row: int, record: dict[str, Any], whole: int) -> None:
        super().__init__(Path(record["path"]), record, whole)
        self.tokens_of, self.row, self.name, self.fix = tokens, row, tokens.name(row), FIX

    def let_go(self) -> None:
        """Close the file if it was removed from the cache; if need be it is fetched again."""
        file = self.__dict__.get("_cached")
        if file is not None and os.fstat(file.number).st_nlink == 0:
            with suppress(KeyError):
                del self.__dict__["_cached"]  # a thread that reads holds it

    @cached_property
    def _cached(self) -> Descriptor | None:
        return self.tokens_of.descriptor(self.row)

    def _read(self, offset: int, dtype: np.dtype[Any], start: int, stop: int) -> NDArray[Any]:
        if (file := self._cached) is not None:
            return self._read_file(file, offset, dtype, start, stop)
        at, size = offset + start * dtype.itemsize, (stop - start) * dtype.itemsize
        return np.frombuffer(self.tokens_of.read(self.row, at, at + size), dtype).copy()


def _free(folder: Path) -> int:
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize
