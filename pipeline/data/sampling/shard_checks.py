"""Token shards compared with what encode committed when they are first used, in a thread beside training.

Of the ranks of a run one hashes a shard: the one whose number is the shard's row in the manifest modulo the number of
ranks. All know from the order which shards a step reads, so nobody has to tell anybody what was opened. A shard that
was compared is looked at again at every checkpoint: where its inode, size or times are others, it is hashed again.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pipeline.console import spelled
from pipeline.contract.input_check import LEFT_AFTER_S, Expected, Pace, compared, lowest_priority
from pipeline.data.exclusion import Range, sample_numbers
from pipeline.data.shard_table import ShardTable

TOGETHER = 1 << 16
"""Samples whose shards are looked up at once."""
SHOWN_STEPS = 1000
"""Steps that are asked whether they read from a damaged shard."""


@dataclass(frozen=True)
class Damage:
    """A shard that is not what was committed: what is told of it, and the first step that may have read it so; None if
    no step reads it."""

    text: str
    step: int | None


@dataclass(frozen=True)
class _Use:
    """Samples that the steps [first, last] read; without samples: look again at what was compared, after step
    `last`."""

    first: int
    last: int
    samples: tuple[Range, ...] = ()
    again: bool = False


class ShardChecks:
    """This rank's part of it.

    Args:
        table: the shards. expected: the file of a row, and what it should hold.
        rows_of: the rows that samples are read from.
        rank, world: of this process among all.
        later: rows to be compared, too, when no step waits for others.
        rest: seconds of rest for each of reading, while nobody waits.

    Attributes:
        checked: how many shards are as they should be.
        seen: bytes of them; while it grows, something is being done.
        damage: the first that is not.
    """

    def __init__(self, table: ShardTable, expected: Callable[[int], Expected],
                 rows_of: Callable[[NDArray[np.int64]], NDArray[np.int64]], rank: int, world: int,
                 later: Iterable[int] = (), rest: float = 0.0) -> None:
        self.table, self.expected, self._rows_of, self._rank, self._world = table, expected, rows_of, rank, world
        self.checked, self.seen = 0, 0
        self.damage: Damage | None = None
        self._later = deque(row for row in later if row % world == rank)
        self._left = len(range(rank, len(table), world))
        self._known = np.zeros((self._left, 5), np.int64)  # inode, size, times, whether it was compared
        self._uses, self._history = deque[_Use](), deque[_Use]()
        self._given, self._done, self._clean = 0, 0, 0
        self._pace, self._news = Pace(rest), threading.Condition()
        self._thread = threading.Thread(target=self._run, name="shard-checks", daemon=True)
        self._thread.start()

    def use(self, first: int, last: int, samples: Sequence[Range]) -> None:
        """The steps from `first` to `last` read these samples."""
        self._give(_Use(first, last, tuple(samples)))

    def look_again(self, step: int) -> int:
        """Have shards that were compared looked at again, after `step`. What to `wait` for, to know of all so far."""
        return self._give(_Use(step, step, again=True))

    def wait(self, given: int | None, seconds: float) -> bool:
        """Wait, without rests, until all is done that was given up to then, or there is damage, for so long at most.
        None: until everything is done, also what no step waits for. Whether it is done."""
        def done() -> bool:
            return self._done >= self._given and not self._later if given is None else self._done >= given
        self._pace.hurry.set()
        with self._news:
            self._news.wait_for(lambda: done() or self.damage is not None, seconds)
        self._pace.hurry.clear()
        return done()

    def close(self) -> None:
        """End the thread; what is not compared stays so. One that a disk keeps from ending is left to itself."""
        self._pace.over.set()
        self._pace.hurry.set()
        with self._news:
            self._news.notify_all()
        self._thread.join(LEFT_AFTER_S)

    def _give(self, use: _Use) -> int:
        with self._news:
            self._given += 1
            self._uses.append(use)
            self._news.notify_all()
            return self._given

    def _run(self) -> None:
        while not self._pace.over.is_set() and self.damage is None:
            with self._news:
                self._news.wait_for(lambda: self._uses or self._later or self._pace.over.is_set())
                use = self._uses.popleft() if self._uses else None
            # In a thread that ends with the work: one of the lowest priority that waits all the time would, on a busy
            # machine, keep a killed process, and with it the stage's lock, from going.
            worker = threading.Thread(target=self._work, args=(use,), name="shard-check", daemon=True)
            worker.start()
            worker.join()
            with self._news:
                self._done += use is not None and self.damage is None
                self._news.notify_all()

    def _work(self, use: _Use | None) -> None:
        try:
            self._do(use)
        except Exception as error:  # noqa: BLE001 - a thread that dies in silence would have found nothing wrong
            self.damage = Damage(f"Token shards could not be compared with what was committed: "
                                 f"{type(error).__name__}: {error}.", None if use is None else use.first)

    def _do(self, use: _Use | None) -> None:
        if use is None:
            if self._later:  # it stays there until it is done: `wait` looks whether there is any
                self._compare(self._later[0], None)
                self._later.popleft()
        elif use.again:
            self._look_again(use)
        else:
            self._history.append(use)
            for rows in self._used(use) if self._left else ():
                for row in rows[rows % self._world == self._rank].tolist():
                    if self.damage is None and not self._pace.over.is_set():
                        self._compare(row, use.first)

    def _used(self, use: _Use) -> Iterable[NDArray[np.int64]]:
        for first, end in use.samples:
            for start in range(first, end, TOGETHER):
                yield self._rows_of(sample_numbers([(start, min(start + TOGETHER, end))]))

    def _compare(self, row: int, step: int | None, *, again: bool = False) -> None:
        """Hash a shard, unless it was compared before; with `again` also then."""
        known = self._known[row // self._world]
        if known[4] and not again:
            return
        lowest_priority()  # this thread's, which ends with the work
        file = self.expected(row)
        stat = _stat(file.path)
        if problem := compared(file, self._pace):
            self.damage = Damage(f"{problem}{self._readers(row, step)}", step)
            return
        if self._pace.over.is_set():
            return
        self.seen += stat[1]
        if not known[4]:
            self.checked, self._left = self.checked + 1, self._left - 1
        known[:] = (*stat, 1)

    def _look_again(self, use: _Use) -> None:
        """Where a shard's file is another one, or has changed, since it was compared: compare it again."""
        for place in np.flatnonzero(self._known[:, 4]).tolist():
            row = place * self._world + self._rank
            if self.damage is None and _stat(self.expected(row).path) != tuple(self._known[place, :4].tolist()):
                self._compare(row, self._clean + 1, again=True)
        if self.damage is None:
            self._history = deque(entry for entry in self._history if entry.last > self._clean)
            self._clean = use.last

    def _readers(self, row: int, step: int | None) -> str:
        """Which of the steps since then read from the shard, in a sentence."""
        if step is None:
            return " No step reads from it: it is held-out text, or not used so far."
        alone, together = list[_Use](), list[_Use]()
        with self._news:
            coming = list(self._uses)
        for use in [*self._history, *coming][:SHOWN_STEPS]:
            if use.last >= step and any(row in rows for rows in self._used(use)):
                (alone if use.first == use.last else together).append(use)
        told = [f"the steps {spelled(sorted({use.first for use in alone}))}"] if alone else []
        told += [f"some of the steps {use.first}-{use.last}" for use in together]
        return f" It was read by {' and '.join(told)}." if told else ""


def _stat(path: Path) -> tuple[int, int, int, int]:
    """What shows that a file was written to or replaced; zeros where it is not there."""
    try:
        found = path.stat()
    except OSError:
        return 0, 0, 0, 0
    return found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns
