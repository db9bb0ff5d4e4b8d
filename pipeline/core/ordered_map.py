"""A pool of threads or processes that keeps the order of its items."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from itertools import chain, islice
from typing import TypeVar

THREADS = 16
Item = TypeVar("Item")
Result = TypeVar("Result")


def ordered_map(function: Callable[[Item], Result], items: Iterable[Item], threads: int = THREADS, *, batch: int = 1,
                name: str = "", pool: Executor | None = None) -> Generator[Result, None, None]:
    """`function` of each item, in order, computed by threads. Items are taken only as results are.

    Args:
        threads: how many; for a pool, the number of batches in progress at a time.
        batch: items per task of a thread. Fewer than two batches are computed without threads.
        name: of the threads.
        pool: computes in place of threads, and is shut down at the end.

    Raises:
        the exception of the first item that fails; no further item is started then.
    """
    rest = iter(items)
    batches = iter(lambda: list(islice(rest, batch)), [])
    first = list(islice(batches, 2))
    if len(first) < 2:
        yield from map(function, chain.from_iterable(first))
        return
    pool, waiting = pool or ThreadPoolExecutor(threads, name), deque[Future[list[Result]]]()
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
