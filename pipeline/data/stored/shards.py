"""Token shards of an object store as training reads them: through the node's cache, or part by part.

Shards that fit into the cache are fetched whole, and compared with the hashes of encode's manifest. A global shuffle
over more than the cache holds would fetch a shard for nearly every sample, so then only the parts that samples need are
asked for. No hash tells whether such a part is right; it is of the object that the store listed when training began
(its ETag is asked for with every part), and its size is what the manifest says.
"""

from __future__ import annotations

import os
import shutil
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
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
from drover.pipeline.data.token_shards import Descriptor, TokenShard
from drover.pipeline.storage.outcomes import Changed, Entry, Missing
from drover.pipeline.storage.store import Store

MEND = "Copy the run's shards there again (python -m drover.tools.copy_tokens), or give another train.tokens_from."


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
        say: told what a user should know.

    Attributes:
        figures: what it took.
    """

    def __init__(self, settings: Settings, table: ShardTable, etags: list[str], say: Callable[[str], None]) -> None:
        self.settings, self.table, self.etags, self.say = settings, table, etags, say
        self.store, self.figures = Store(settings.url), Figures()
        self._shards = weakref.WeakSet[StoredShard]()
        self._lock, self._told = threading.Lock(), False
        self._cache: NodeCache | None = None

    def __call__(self, row: int, record: dict[str, Any], whole: int) -> StoredShard:
        """The shard in a row of the table (`drover.pipeline.data.shard_table.Opener`)."""
        shard = StoredShard(self, row, record, whole)
        with self._lock:
            self._shards.add(shard)
        return shard

    @property
    def cache(self) -> NodeCache:
        """This process's access to the node's cache, from the first time on that it is asked for."""
        with self._lock:
            if self._cache is None:
                self._cache = NodeCache(self.settings.folder, self.settings.limit, self.figures, self.say)
            return self._cache

    def descriptor(self, row: int, *, ahead: bool = False) -> Descriptor | None:
        """An open file with the whole shard; None where only parts are read, as there is no room for it. ahead: it is
        not needed yet: nobody waits for it, and nothing goes for it that others need soon."""
        if not self.settings.whole:
            return None
        record = self.table.record(row)
        cache, size = self.cache, record["bytes"]
        number = cache.open(self.name(row), record["sha256"], size, lambda: self._stream(row), ahead=ahead)
        if number is None and not ahead and not self._told:
            self._told = True
            self.say(f"{cache.folder} has no room for a shard of {size / 1e9:.3f} GB (the cache's bound is "
                     f"{cache.limit / 1e9:.3f} GB, its disk has {shutil.disk_usage(cache.folder).free / 1e9:.3f} GB "
                     f"left): parts of such shards are read from {self.settings.url}")
        return None if number is None else Descriptor(number)

    def read(self, row: int, start: int, stop: int) -> bytes:
        """Bytes of a shard's object."""
        began = time.perf_counter()
        try:
            data = self.store.read(self.table.path(row), start, stop, etag=self.etags[row])
        except Changed:
            raise UserError(f"{self.name(row)} was changed in the store since this start of training began. "
                            f"{MEND}") from None
        except Missing:
            raise UserError(f"{self.name(row)} is not in the store any more. {MEND}") from None
        self.figures.add(ranges=1, range_bytes=len(data), wait_s=time.perf_counter() - began)
        return data

    def let_go(self) -> None:
        """Close files that were removed from the cache: until then, they take room on the disk."""
        with self._lock:
            shards = list(self._shards)
        for shard in shards:
            shard.let_go()

    def name(self, row: int) -> str:
        """What a shard is called in errors."""
        return self.store.url_of(self.table.path(row))

    def close(self) -> None:
        """Fetch nothing more."""
        with self._lock:
            if self._cache is not None:
                self._cache.close()

    def _stream(self, row: int) -> BinaryIO:
        size = int(self.table.record(row)["bytes"])
        return self.store.stream(self.table.path(row), entry=Entry(self.table.path(row), size, "", 0.0))


class StoredShard(TokenShard):
    """A token shard whose file is in an object store."""

    def __init__(self, tokens: StoredTokens, row: int, record: dict[str, Any], whole: int) -> None:
        super().__init__(Path(record["path"]), record, whole)
        self.tokens_of, self.row, self.name, self.mend = tokens, row, tokens.name(row), MEND

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
