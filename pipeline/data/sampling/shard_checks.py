"""Compare token shards with what encode committed when they are first used, in a background thread of training.

One rank hashes a shard: its number is the shard's row in the manifest modulo the number of ranks. Every rank knows from
the order which shards a step reads, so nothing has to be sent. At every checkpoint the shards that were compared are
checked again: one whose inode, size or times have changed is hashed again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from drover.pipeline.contract.input_check import LEFT_AFTER_S, Expected, Pace, compared, lowest_priority
from drover.pipeline.core.background import BackgroundWorker
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
        self._history, self._clean, self._pace = deque[_Use](), 0, Pace(rest)
        # A thread of the lowest priority that only waits could keep a killed process, and with it the stage's lock,
        # alive on a busy machine.
        self._worker = BackgroundWorker[_Use | None]("shard-checks", self._check, stays=False)
        self._worker.put(None)

    @property
    def checked(self) -> int:
        """How many shards are as they should be."""
        return len(self._known)

    def use(self, first: int, last: int, samples: Sequence[Range]) -> None:
        """The steps from `first` to `last` read these samples."""
        self._worker.put(_Use(first, last, tuple(samples)))

    def look_again(self, step: int) -> object:
        """Check compared shards again, after `step`. Returns what to `wait` for, to know about all so far."""
        use = _Use(step, step, None)
        self._worker.put(use)
        return use

    def wait(self, given: object, seconds: float) -> bool:
        """Wait, without rests, until everything up to `given` is done, at most `seconds`. None: until everything is
        done, also shards that no step waits for. An object that was never handed over counts as done. Once damage is
        found, nothing further is compared, so that the wait soon ends. Returns whether it is done without damage."""
        self._pace.hurry.set()
        done = self._worker.wait(seconds, given)
        self._pace.hurry.clear()
        return done and self.damage is None

    def close(self) -> None:
        """End the thread; other shards stay unchecked. A thread that hangs on a disk is left behind."""
        self._pace.over.set()
        self._pace.hurry.set()
        self._worker.close(LEFT_AFTER_S, drop=True)

    def _check(self, use: _Use | None) -> None:
        """Do what a use asks for, unless damage was found; None: compare a shard that no step waits for."""
        if self.damage is not None:
            return
        lowest_priority()
        try:
            if use is not None:
                self._do(use)
            elif self._later and not self._worker.waiting():  # uses go first; the last of them puts None again
                self._compare(self._later.popleft(), None)
        except Exception as error:  # noqa: BLE001 - a thread that dies in silence would have found nothing wrong
            self.damage = Damage(f"Token shards could not be compared with what was committed: "
                                 f"{type(error).__name__}: {error}.", None if use is None else use.first)
        if self._later and self.damage is None and not self._worker.waiting():
            self._worker.put(None)

    def _do(self, use: _Use) -> None:
        if use.samples is not None:
            self._history.append(use)
            for rows in self._used(use) if self.checked < self._mine else ():
                if self.damage is not None:
                    return
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
        coming = [use for use in self._worker.pending() if use is not None and use not in self._history]
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
