"""One thread that handles items in order while the rest of the process goes on."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class BackgroundWorker(Generic[T]):
    """A daemon thread that calls `handle(item)` for each item that is put, in order.

    Args:
        newest_only: only the newest of the waiting items is kept.
        most: how many items may wait; None: any number.

    Attributes:
        error: what `handle` raised. The thread has ended then, and what waits is dropped.
        closing: whether no more items will be put.
    """

    def __init__(self, name: str, handle: Callable[[T], None], *, newest_only: bool = False,
                 most: int | None = None) -> None:
        self.error: BaseException | None = None
        self.closing = False
        self._handle, self._newest_only, self._most = handle, newest_only, most
        self._waiting, self._current = deque[T](), list[T]()
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, daemon=True, name=name)
        self._thread.start()

    def put(self, item: T) -> list[T]:
        """Hand an item over; returns the items that will not be handled for it.

        That is the one that waited, with `newest_only`; the item itself, where too many wait or the thread has ended.
        """
        with self._changed:
            if self.error is not None or self.closing or len(self._waiting) == self._most:
                return [item]
            dropped = list(self._waiting) if self._newest_only else []
            if self._newest_only:
                self._waiting.clear()
            self._waiting.append(item)
            self._changed.notify_all()
            return dropped

    def pending(self) -> list[T]:
        """The item that is being handled, and those that wait."""
        with self._changed:
            return [*self._current, *self._waiting]

    def waiting(self, timeout: float = 0.0) -> bool:
        """Whether another item waits; if not, wait for one for so many seconds, but not after `close`."""
        with self._changed:
            self._changed.wait_for(lambda: bool(self._waiting) or self.closing, timeout)
            return bool(self._waiting)

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until every item is handled or the thread has ended, for so many seconds; whether that is so."""
        with self._changed:
            return self._changed.wait_for(lambda: self.error is not None or not (self._waiting or self._current),
                                          timeout)

    def close(self, timeout: float | None = None, *, drop: bool = False) -> bool:
        """Take no more items, and wait until those that are there are handled; whether they are. Idempotent.

        drop: forget the items that wait.
        """
        with self._changed:
            self.closing = True
            if drop:
                self._waiting.clear()
            self._changed.notify_all()
        return self.wait(timeout)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: bool(self._waiting) or self.closing)
                if not self._waiting:
                    return
                self._current.append(self._waiting.popleft())
            try:
                self._handle(self._current[0])
            except BaseException as error:  # noqa: BLE001 - whoever waits looks at it
                self.error = error
            with self._changed:
                self._current.clear()
                self._changed.notify_all()
            if self.error is not None:
                return
