"""Runs of n words that occur more than once in a text: hashes find candidates, the words themselves decide."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

_BASE = np.uint64(0x9E3779B97F4A7C15)
"""Of the rolling hash; odd, so that no power of it is 0 modulo 2^64."""


class WordRuns:
    """The runs of n consecutive words of one text.

    Runs are compared as their characters without what is between the words, hash by hash first: sum(c_k BASE^k) modulo
    2^64 over the characters c_k, brought to one place by BASE^(characters - start). Runs with different hashes differ;
    those with equal ones are looked at, so that a hash decides nothing.
    """

    def __init__(self, words: list[str]) -> None:
        self._words = words
        self._text = "".join(words)
        self._starts = np.zeros(len(words) + 1, np.int64)
        np.cumsum(np.fromiter(map(len, words), np.int64, len(words)), out=self._starts[1:])
        codes = np.frombuffer(self._text.encode("utf-32-le", "surrogatepass"), np.uint32)
        powers = np.full(len(codes) + 1, _BASE)
        powers[0] = 1
        np.cumprod(powers, out=powers)
        sums = np.zeros(len(codes) + 1, np.uint64)
        np.cumsum(codes * powers[:-1], out=sums[1:])
        self._sums, self._shifts = sums[self._starts], powers[len(codes) - self._starts]

    def top_is_above(self, n: int, share: float, characters: int) -> bool:
        """Whether the most frequent run of n words is more than `share` of `characters`: its length, with a space
        between words, times how often it occurs. Of equally frequent runs the first one counts."""
        if len(self._words) < n:
            return False
        hashes = self._hashes(n)
        ordered = np.sort(hashes)
        ends = np.flatnonzero(ordered[1:] != ordered[:-1])
        counts = np.diff(ends, prepend=-1, append=len(ordered) - 1)
        most = int(counts.max())
        longest = int((self._starts[n:] - self._starts[:-n]).max()) + n - 1
        if most * longest / characters <= share:
            return False
        frequent = ordered[np.append(ends, len(ordered) - 1)[counts == most]]
        first = int(np.isin(hashes, frequent).argmax())
        run: Sequence[str] = self._words[first:first + n]
        if any(self._words[place:place + n] != run for place in np.flatnonzero(hashes == hashes[first]).tolist()):
            # Other words of equal characters, or of an equal hash.
            runs = Counter(zip(*(self._words[place:] for place in range(n)), strict=False))
            [(run, most)] = runs.most_common(1)
        return (sum(map(len, run)) + n - 1) * most / characters > share

    def repeated_are_above(self, n: int, share: float, characters: int) -> bool:
        """Whether runs of n words that repeat an earlier run are more than `share` of `characters`. Repeated runs are
        counted from the left and do not overlap; a run that begins inside a counted one is not seen at all."""
        if len(self._words) < n:
            return False
        hashes = self._hashes(n)
        ordered = np.sort(hashes)
        again = ordered[1:][ordered[1:] == ordered[:-1]]
        longest = int((self._starts[n:] - self._starts[:-n]).max())
        if len(again) * longest / characters <= share:
            return False
        seen: set[str] = set()
        repeated = behind = 0
        starts = self._starts.tolist()
        for place in np.flatnonzero(np.isin(hashes, again)).tolist():
            if place < behind:
                continue
            run = self._text[starts[place]:starts[place + n]]
            if run in seen:
                repeated += len(run)
                behind = place + n
            else:
                seen.add(run)
        return repeated / characters > share

    def _hashes(self, n: int) -> np.ndarray:
        """(words - n + 1,) uint64: of each run of n words."""
        return (self._sums[n:] - self._sums[:-n]) * self._shifts[:len(self._sums) - n]
