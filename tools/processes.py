"""Work of tools in worker processes, with results in the order of the items."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from typing import TypeVar

from drover.pipeline.contract.threads import usable_cores
from drover.pipeline.core.errors import UserError
from drover.pipeline.core.ordered_map import ordered_map
from drover.pipeline.core.orphans import end_with_parent

AHEAD = 2
"""Batches handed out per process. Results that are early wait in memory."""
Item = TypeVar("Item")
Result = TypeVar("Result")


def in_order(function: Callable[[Item], Result], items: Iterable[Item], processes: int,
             at_once: int = 1) -> Generator[Result]:
    """`function` of each item, in their order. With one process it runs in place. Close the iterator to stop early.
    at_once: items that a process gets together.

    Raises:
        UserError: `function` raised it, or a process was killed.
    """
    if processes == 1:
        yield from map(function, items)
        return
    pool = ProcessPoolExecutor(processes, mp_context=get_context("spawn"), initializer=end_with_parent,
                               initargs=(os.getpid(),))
    try:
        yield from ordered_map(function, items, AHEAD * processes, batch=at_once, pool=pool)
    except BrokenProcessPool:
        raise UserError("A worker process was killed, as the kernel does when memory runs out (see dmesg). Run the "
                        "command again with fewer --processes.") from None


def processes_asked(asked: int | None) -> int:
    """The number of processes: as given, or one for each core that this process may use, at most eight."""
    if asked is not None and asked < 1:
        raise UserError(f"--processes counts from 1; asked: {asked}.")
    return asked or min(8, usable_cores())
