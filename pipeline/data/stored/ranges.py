"""Parts of objects in memory, for shards that are not kept whole: what was read ahead is found when it is needed."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future

Key = tuple[int, int, int]
"""A shard's row in its table, and the bytes of it: from, to."""


class RangeMemory:
    """The parts that were read last, within a bound of bytes. Threads may share it: one of them fetches a part, the
    others wait for it."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._parts: OrderedDict[Key, Future[bytes]] = OrderedDict()
        self._bytes, self._lock = 0, threading.Lock()

    def read(self, key: Key, ask: Callable[[], bytes]) -> bytes:
        """The part, by `ask` if it is not there. What `ask` raises is raised for all who wait, and not kept."""
        with self._lock:
            part = self._parts.get(key)
            mine = part is None
            if part is None:
                part = self._parts[key] = Future()
                self._bytes += key[2] - key[1]
                while self._bytes > self.most and len(self._parts) > 1:
                    (_, start, stop), _ = self._parts.popitem(last=False)  # who waits for it holds it
                    self._bytes -= stop - start
            else:
                self._parts.move_to_end(key)
        if mine:
            try:
                part.set_result(ask())
            except BaseException as error:
                with self._lock:
                    if self._parts.get(key) is part:
                        del self._parts[key]
                        self._bytes -= key[2] - key[1]
                part.set_exception(error)
                raise
        return part.result()
