"""Sample numbers that are left out on purpose, and the batches that are made of the others.

The order of samples stays one line of numbers, and its state one integer, the cursor: a batch is the next so many
numbers from the cursor on that are not excluded. So what a step sees depends on the cursor and the excluded ranges
only, never on when they were excluded or how often training went back.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np

Range = tuple[int, int]
"""Sample numbers [first, end)."""


@dataclass(frozen=True)
class TakenRanges:
    """What `take` gives: sample numbers as ranges, in order, and the cursor after them."""

    ranges: tuple[Range, ...]
    end: int


@dataclass(frozen=True, init=False)
class Excluded:
    """Ranges of sample numbers that no batch holds.

    Attributes:
        ranges: the excluded ranges, sorted, disjoint and not touching; empty ones are dropped, others merged.
    """

    ranges: tuple[Range, ...]

    def __init__(self, ranges: Iterable[Sequence[int]] = ()) -> None:
        merged: list[Range] = []
        for first, end in sorted((int(first), int(end)) for first, end in ranges):
            assert 0 <= first <= end, f"[{first}, {end}) is no range of sample numbers"
            if merged and first <= merged[-1][1]:
                merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
            elif first < end:
                merged.append((first, end))
        object.__setattr__(self, "ranges", tuple(merged))

    def take(self, cursor: int, count: int) -> TakenRanges:
        """The next `count` samples from `cursor` on that are not excluded.

        The cursor after them is one past the last: excluded samples that follow belong to the next batch's span. Taking
        a and then b samples gives the same numbers and cursor as taking a + b.
        """
        taken: list[Range] = []
        for first, end in self.ranges:
            if count == 0 or end <= cursor:
                continue
            if (length := min(count, first - cursor)) > 0:
                taken.append((cursor, cursor + length))
                cursor, count = cursor + length, count - length
            if count:
                cursor = end
        if count:
            taken.append((cursor, cursor + count))
            cursor += count
        return TakenRanges(tuple(taken), cursor)

    def numbers(self, cursor: int, skip: int, count: int) -> np.ndarray:
        """Sample numbers `skip` to `skip + count` of those from `cursor` on, int64: a rank's part of a coming batch."""
        return sample_numbers(self.take(self.take(cursor, skip).end, count).ranges)

    def within(self, first: int, end: int) -> list[Range]:
        """The excluded parts of [first, end)."""
        return [part for a, b in self.ranges if (part := (max(first, a), min(end, b)))[0] < part[1]]

    def remaining(self, first: int, end: int) -> list[Range]:
        """The parts of [first, end) that are not excluded."""
        edges = [first, *(edge for part in self.within(first, end) for edge in part), end]
        return [(a, b) for a, b in zip(edges[::2], edges[1::2], strict=True) if a < b]


def sample_numbers(ranges: Iterable[Sequence[int]]) -> np.ndarray:
    """The numbers in `ranges`, in their order, int64."""
    import numpy as np

    parts = [np.arange(first, end, dtype=np.int64) for first, end in ranges]
    return np.concatenate(parts) if parts else np.empty(0, np.int64)


def ranges_of(numbers: np.ndarray) -> list[Range]:
    """Ascending sample numbers as ranges."""
    import numpy as np

    runs = np.split(numbers, np.flatnonzero(np.diff(numbers) != 1) + 1)
    return [(int(run[0]), int(run[-1]) + 1) for run in runs if len(run)]


def format_ranges(ranges: Iterable[Sequence[int]]) -> str:
    """Ranges for a person: `[304, 320) and [328, 336)`."""
    return " and ".join(f"[{first}, {end})" for first, end in ranges)
