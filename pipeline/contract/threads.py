"""How much may be done at once: the cores of this process, and threads that look at many files.

These wait for the file system, most of all for one behind a network.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from itertools import islice
from typing import TypeVar

THREADS = 16
AT_ONCE = 512
"""Items that a thread is given at a time, and fewer than which take none."""
Item = TypeVar("Item")
Result = TypeVar("Result")


def usable_cores() -> int:
    """Cores that this process may use; all of the machine's where the system, as macOS, knows no such limit."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity is not None else os.cpu_count() or 1


def in_threads(function: Callable[[Item], Result], items: Iterable[Item]) -> Iterator[Result]:
    """`function` of each item, in no order that means anything. `items` is taken from as room is made."""
    rest = iter(items)
    first = list(islice(rest, AT_ONCE))
    if len(first) < AT_ONCE:
        yield from map(function, first)
        return
    with ThreadPoolExecutor(THREADS) as pool:
        def submitted(batch: list[Item]) -> Future[list[Result]]:
            return pool.submit(lambda: list(map(function, batch)))
        running = {submitted(first)}
        while running:
            while len(running) < 2 * THREADS and (batch := list(islice(rest, AT_ONCE))):
                running.add(submitted(batch))
            done, running = wait(running, return_when=FIRST_COMPLETED)
            for future in done:
                yield from future.result()
