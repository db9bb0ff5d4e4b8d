"""Compare token shards with what encode committed when they are first used, in a background thread of training.

One rank hashes a shard: its number is the shard's row in the manifest modulo the number of ranks. Every rank knows from
the order which shards a step reads, so nothing has to be sent. At every checkpoint the shards that were compared are
checked again: one whose inode, size or times have changed is hashed again.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from drover.pipeline.contract.input_check import LEFT_AFTER_S, Expected, Pace, compared, lowest_priority
from drover.pipeline.core.console import spelled
from drover.pipeline.data.exclusion import Range, sample_numbers

TOGETHER = 1 << 16
"""Samples whose shards are looked up at once."""
SHOWN_STEPS = 1000
"""Steps that are searched for readers of a damaged shard."""


@dataclass(frozen=True)
class Damage:
    """A shard that is not what was committed: the message, and the first step that may have read the damage; None if no
    step reads the shard."""

    text: str
    step: int | None


@dataclass(frozen=True)
class _Use:
    """Samples that the steps [first, last] read; None: check compared shards again, after step `last`."""

    first: int
    last: int
    samples: tuple[Range, ...] | None


class ShardChecks:
    """The checks of this rank.

    Args:
        table: the shards. expected: the file of a row, and what it should hold.
        rows_of: the rows that samples are read from.
        rank, world: of this process among all.
        later: rows to be compared, too, when no step waits for others.
        rest: seconds of rest for each of reading, while nobody waits.

    Attributes:
        seen: bytes of shards that are as they should be; while it grows, something is being done.
        damage: the first that is not.
    """

    def __init__(self, table: Sized, expected: Callable[[int], Expected],
                 rows_of: Callable[[NDArray[np.int64]], NDArray[np.int64]], rank: int, world: int,
                 later: Iterable[int] = (), rest: float = 0.0) -> None:
        self.expected, self._rows_of, self._rank, self._world = expected, rows_of, rank, world
        self._mine = len(range(rank, len(table), world))
        self.seen = 0
        self.damage: Damage | None = None
        self._later = deque(row for row in later if row % world == rank)
        self._known = dict[int, tuple[int, ...]]()  # what showed the state of shards that were compared, by row
        self._uses, self._history = deque[_Use](), deque[_Use]()
        self._given, self._done, self._clean = 0, 0, 0
        self._pace, self._news = Pace(rest), threading.Condition()
        self._thread: threading.Thread | None = None
        with self._news:
            self._start()

    @property
    def checked(self) -> int:
        """How many shards are as they should be."""
        return len(self._known)

    def use(self, first: int, last: int, samples: Sequence[Range]) -> None:
        """The steps from `first` to `last` read these samples."""
        self._give(_Use(first, last, tuple(samples)))

    def look_again(self, step: int) -> int:
        """Check compared shards again, after `step`. Returns what to `wait` for, to know about all so far."""
        return self._give(_Use(step, step, None))

    def wait(self, given: int | None, seconds: float) -> bool:
        """Wait, without rests, until everything up to `given` is done or damage is found, at most `seconds`. None:
        until everything is done, also shards that no step waits for. Returns whether it is done."""
        def done() -> bool:
            return self._done >= self._given and not self._later if given is None else self._done >= given
        self._pace.hurry.set()
        with self._news:
            self._news.wait_for(lambda: done() or self.damage is not None, seconds)
        self._pace.hurry.clear()
        return done()

    def close(self) -> None:
        """End the thread; other shards stay unchecked. A thread that hangs on a disk is left behind."""
        self._pace.over.set()
        self._pace.hurry.set()
        if (thread := self._thread) is not None:
            thread.join(LEFT_AFTER_S)

    def _give(self, use: _Use) -> int:
        with self._news:
            self._given += 1
            self._uses.append(use)
            self._start()
            return self._given

    def _start(self) -> None:
        """Run a thread that ends when its work is done. A thread of the lowest priority that only waits could keep a
        killed process, and with it the stage's lock, alive on a busy machine."""
        if self._thread is None and not self._ended():
            self._thread = threading.Thread(target=self._run, name="shard-checks", daemon=True)
            self._thread.start()

    def _ended(self) -> bool:
        return self._pace.over.is_set() or self.damage is not None or not (self._uses or self._later)

    def _run(self) -> None:
        lowest_priority()
        while True:
            with self._news:
                if self._ended():
                    self._thread = None
                    return
                use = self._uses.popleft() if self._uses else None
            try:
                if use is not None:
                    self._do(use)
                else:
                    self._compare(self._later[0], None)
            except Exception as error:  # noqa: BLE001 - a thread that dies in silence would have found nothing wrong
                self.damage = Damage(f"Token shards could not be compared with what was committed: "
                                     f"{type(error).__name__}: {error}.", None if use is None else use.first)
            with self._news:
                if use is None:
                    self._later.popleft()  # not before: `wait` looks whether there is any
                self._done += use is not None and self.damage is None
                self._news.notify_all()

    def _do(self, use: _Use) -> None:
        if use.samples is not None:
            self._history.append(use)
            for rows in self._used(use) if self.checked < self._mine else ():
                for row in rows[rows % self._world == self._rank].tolist():
                    self._compare(row, use.first)
            return
        for row, state in list(self._known.items()):
            if _state(self.expected(row).path) != state:
                self._compare(row, self._clean + 1, again=True)
        if self.damage is None:
            self._history = deque(entry for entry in self._history if entry.last > self._clean)
            self._clean = use.last

    def _used(self, use: _Use) -> Iterator[NDArray[np.int64]]:
        for first, end in use.samples or ():
            for start in range(first, end, TOGETHER):
                yield self._rows_of(sample_numbers([(start, min(start + TOGETHER, end))]))

    def _compare(self, row: int, step: int | None, *, again: bool = False) -> None:
        """Hash a shard, unless it was compared before; with `again` also then."""
        if self.damage is not None or self._pace.over.is_set() or (row in self._known and not again):
            return
        file = self.expected(row)
        state = _state(file.path)
        if problem := compared(file, self._pace):
            self.damage = Damage(f"{problem}{self._readers(row, step)}", step)
        elif not self._pace.over.is_set():
            self.seen += state[1]
            self._known[row] = state

    def _readers(self, row: int, step: int | None) -> str:
        """A sentence that names the steps since `step` that read from the shard."""
        if step is None:
            return " No step reads from it: it is validation text, or not used so far."
        alone, together = list[_Use](), list[_Use]()
        with self._news:
            coming = list(self._uses)
        for use in [*self._history, *coming][:SHOWN_STEPS]:
            if use.last >= step and any(row in rows for rows in self._used(use)):
                (alone if use.first == use.last else together).append(use)
        steps = [f"the steps {spelled(sorted({use.first for use in alone}))}"] if alone else []
        steps += [f"some of the steps {use.first}-{use.last}" for use in together]
        return f" It was read by {' and '.join(steps)}." if steps else ""


def _state(path: Path) -> tuple[int, ...]:
    """Inode, size and times of a file, which change when it is written to or replaced; zeros if it is missing."""
    try:
        found = path.stat()
    except OSError:
        return 0, 0, 0, 0
    return found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns
