"""A thread that handles items in order while the rest of the process continues."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class BackgroundWorker(Generic[T]):
    """A daemon thread that calls `handle(item)` for each item that is put, in order.

    Args:
        newest_only: keep only the newest of the waiting items.
        stays: keep the thread while no item waits. Otherwise it ends, and `put` starts a new one for the next item.

    Raises:
        RuntimeError: no thread can be started. Without `stays`, `put` raises it, and has not taken the item.

    Attributes:
        error: the exception that `handle` raised. The thread has then ended, and waiting items are dropped.
        closing: whether no more items will be put.
    """

    def __init__(self, name: str, handle: Callable[[T], None], *, newest_only: bool = False,
                 stays: bool = True) -> None:
        self.error: BaseException | None = None
        self.closing = False
        self._name, self._handle, self._newest_only, self._stays = name, handle, newest_only, stays
        self._waiting, self._current = deque[T](), list[T]()
        self._changed, self._runs = threading.Condition(), False
        if stays:
            self._start()

    def put(self, item: T) -> bool:
        """Hand over an item. Returns whether it is taken: not if the thread has ended. With
        `newest_only` the item that waited is dropped."""
        with self._changed:
            if self.error is not None or self.closing:
                return False
            if not self._runs:
                self._start()
            if self._newest_only:
                self._waiting.clear()
            self._waiting.append(item)
            self._changed.notify_all()
            return True

    def pending(self) -> list[T]:
        """The item that is being handled, and the waiting ones."""
        with self._changed:
            return [*self._current, *self._waiting]

    def waiting(self, timeout: float = 0.0) -> bool:
        """Whether another item waits. If not, wait up to `timeout` seconds for one, but not after `close`."""
        with self._changed:
            self._changed.wait_for(lambda: bool(self._waiting) or self.closing, timeout)
            return bool(self._waiting)

    def wait(self, timeout: float | None = None) -> bool:
        """Wait up to `timeout` seconds until every item is handled or the thread has failed; returns whether that is
        so."""
        with self._changed:
            return self._changed.wait_for(
                lambda: self.error is not None or not (self._current or self._waiting), timeout)

    def close(self, timeout: float | None = None, *, drop: bool = False) -> bool:
        """Take no more items, and wait until all are handled; returns whether they are. Idempotent.

        drop: forget the waiting items.
        """
        with self._changed:
            self.closing = True
            if drop:
                self._waiting.clear()
            self._changed.notify_all()
        return self.wait(timeout)

    def _start(self) -> None:
        threading.Thread(target=self._run, daemon=True, name=self._name).start()
        self._runs = True

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: bool(self._waiting) or self.closing or not self._stays)
                if not self._waiting:
                    self._runs = False
                    return
                self._current.append(self._waiting.popleft())
            try:
                self._handle(self._current[0])
            except BaseException as error:  # noqa: BLE001 - callers check it
                self.error = error
            with self._changed:
                self._current.clear()
                self._changed.notify_all()
            if self.error is not None:
                return
