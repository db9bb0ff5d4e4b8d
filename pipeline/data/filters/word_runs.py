"""Runs of n words that stand in one text more than once: hashes say where to look, the words themselves decide."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import lru_cache

import numpy as np

_BASE, _BITS = 0x9E3779B97F4A7C15, (1 << 64) - 1
"""Of the rolling hash, modulo 2^64."""
_LONG = 64
"""Longer words are not remembered."""


class WordRuns:
    """The runs of n consecutive words of one text; asked for one n after another, each no less than before.

    Runs are compared as their characters without what is between the words, hash by hash first: that of a run is made
    of those of its words, whatever its characters are divided into. Runs with different hashes differ; those with equal
    ones are looked at, so that a hash decides nothing.
    """

    def __init__(self, words: list[str]) -> None:
        self._words = words
        self._text = "".join(words)
        self._starts = np.zeros(len(words) + 1, np.int64)
        np.cumsum(np.fromiter(map(len, words), np.int64, len(words)), out=self._starts[1:])
        numbers = {word: number for number, word in enumerate(dict.fromkeys(words))}
        known = [(_hash if len(word) > _LONG else _remembered)(word) for word in numbers]
        places = np.fromiter(map(numbers.__getitem__, words), np.int64, len(words))
        self._own, self._factors = np.array(known, np.uint64).reshape(-1, 2)[places].T
        self._runs, self._n = self._own, 1

    def top_is_above(self, n: int, share: float, characters: int) -> bool:
        """Whether the most frequent run of n words, the first of equally frequent ones, counted with a space between
        its words and as often as it stands there, is more than `share` of `characters`."""
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
        """Whether runs of n words that stood before, taken from the left without overlapping, are more than `share` of
        `characters`. A run that is jumped over, or that begins inside of a taken one, has not stood before."""
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
        for length in range(self._n, n):
            self._runs = self._runs[:-1] * self._factors[length:] + self._own[length:]
        self._n = n
        return self._runs


def _hash(word: str) -> tuple[int, int]:
    """The hash of a word, and what that of the characters before it is multiplied by."""
    found, factor = 0, 1
    for character in word:
        found, factor = (found * _BASE + ord(character)) & _BITS, factor * _BASE & _BITS
    return found, factor


_remembered = lru_cache(1 << 16)(_hash)
