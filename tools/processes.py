"""Work of tools in processes of their own, whose results come in the order of what was asked."""

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
"""Batches handed out for each process: what is done too early waits in memory."""
Item = TypeVar("Item")
Result = TypeVar("Result")


def in_order(function: Callable[[Item], Result], items: Iterable[Item], processes: int,
             at_once: int = 1) -> Generator[Result]:
    """`function` of each item, in their order; one process works in place. Who has seen enough closes the iterator.
    at_once: how many items a process is given together.

    Raises:
        UserError: what `function` raises, or a process was killed.
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
    """How many processes to take: as asked, or one for each core that this process may use, eight at most."""
    if asked is not None and asked < 1:
        raise UserError(f"--processes counts from 1; asked: {asked}.")
    return asked or min(8, usable_cores())
