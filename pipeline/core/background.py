"""Threads: one that handles items in order, pools that keep the order of their items, one that watches the parent."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import chain, islice
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


THREADS = 16
Item = TypeVar("Item")
Result = TypeVar("Result")


def ordered_map(function: Callable[[Item], Result], items: Iterable[Item], threads: int = THREADS, *, batch: int = 1,
                name: str = "") -> Generator[Result, None, None]:
    """`function` of each item, in order, computed by threads. Items are taken only as results are.

    Args:
        threads: how many.
        batch: items per task of a thread. Fewer than two batches are computed without threads.
        name: of the threads.

    Raises:
        the exception of the first item that fails; no further item is started then.
    """
    rest = iter(items)
    batches = iter(lambda: list(islice(rest, batch)), [])
    first = list(islice(batches, 2))
    if len(first) < 2:
        yield from map(function, chain.from_iterable(first))
        return
    pool, waiting = ThreadPoolExecutor(threads, name), deque[Future[list[Result]]]()
    try:
        for some in chain(first, batches):
            waiting.append(pool.submit(_each, function, some))
            if len(waiting) == threads:
                yield from waiting.popleft().result()
        while waiting:
            yield from waiting.popleft().result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _each(function: Callable[[Item], Result], some: list[Item]) -> list[Result]:
    return list(map(function, some))


def end_with_parent(parent: int) -> None:
    """Start a thread that ends this process as soon as process `parent` is no longer its parent.

    A killed parent cannot notify its children; they would continue, hold locks and write.
    """
    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.25)
        os._exit(1)
    threading.Thread(target=watch, name="end with parent", daemon=True).start()


def usable_cores() -> int:
    """Cores that this process may use; all of the machine's where the system, as macOS, knows no such limit."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity is not None else os.cpu_count() or 1
