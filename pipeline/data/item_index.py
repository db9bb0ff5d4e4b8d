"""Texts as they are compared where spelling, case, punctuation and layout are not to matter, and which items of
evaluation sets documents contain: n-grams of words, found by their hashes and then compared word by word."""

from __future__ import annotations

import html
import re
import unicodedata
from collections.abc import Iterable, Iterator
from itertools import repeat

import numpy as np

from drover.pipeline.data.mixing import GOLDEN, mixed

_WORD = re.compile(r"[^\W_]+")
_LETTERS = ("\u0e01-\u0e3a\u0e40-\u0e4e\u0e81-\u0ece"                # Thai, Lao
            "\u1000-\u103f\u1050-\u109f\u1780-\u17d3")               # Burmese, Khmer
WITHOUT_SPACES = (_LETTERS + "\u3005-\u3007\u3041-\u3096\u309d-\u309f"  # iteration marks and zero, hiragana
                  "\u30a1-\u30fa\u30fc-\u30ff\u31f0-\u31ff\uff66-\uff9f"  # katakana
                  "\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003fffd")  # Han
"""Letters of scripts that put no spaces between words, with their vowel signs and marks."""
_CHARACTER = re.compile(f"[{WITHOUT_SPACES}]")
_CHARACTER_OR_WORD = re.compile(f"{_CHARACTER.pattern}|[^\\W_{WITHOUT_SPACES}]+")
_LETTER = re.compile(f"[{_LETTERS}]")
_INVISIBLE = "\u00ad\u2060\ufeff"
"""Soft hyphens, word joiners and byte order marks, which stand inside of words."""


def comparable_words(text: str) -> list[str]:
    """The words of a text, runs of letters and digits, in Unicode's NFKC and with their case folded. In scripts that
    put no spaces between words, each character is one. HTML's entities (&nbsp;, &amp;) are the characters that they
    mean; soft hyphens and the like are left out."""
    if "&" in text:
        text = html.unescape(text)
    if not text.isascii():
        for character in _INVISIBLE:
            text = text.replace(character, "")
        text = unicodedata.normalize("NFKC", text)
        if _CHARACTER.search(text):
            return _CHARACTER_OR_WORD.findall(text.casefold())
    return _WORD.findall(text.casefold())


def length_in_words(words: list[str]) -> float:
    """The length of a text of `comparable_words` in words: three letters of Thai and the like are about one."""
    letters = sum(map(bool, map(_LETTER.match, words)))
    return len(words) - 2 * letters / 3


class ItemIndex:
    """The n-grams of texts, sorted by hash. An n-gram takes 24 bytes, a word of a text 8.

    A text of fewer than n words is one n-gram of its own length; one of fewer than `least` words is not looked for. A
    letter of Thai and the like is a third of a word, so that an n-gram of such letters has 3 n of them.

    Args:
        texts: of the items.
        n: words of an n-gram.
        least: words of the shortest text that is looked for.

    Attributes:
        too_short: (texts,) bool: which are not looked for.
        places: words of all texts, and one: n-grams are named by the place of their first word among these.
    """

    def __init__(self, texts: Iterable[str], n: int, least: int) -> None:
        self._numbers: dict[str, int] = {}  # of words, from 1: exact, so that equal numbers are equal words
        numbers, starts, in_words = [0], [1], []
        for text in texts:
            words = comparable_words(text)
            numbers += [self._numbers.setdefault(word, len(self._numbers) + 1) for word in words]
            starts.append(len(numbers))
            in_words.append(length_in_words(words))
        self._words, self._starts = np.array(numbers, np.int64), np.array(starts, np.int64)
        lengths, self.places = np.diff(self._starts), len(numbers)
        counts = np.array(in_words)
        self.too_short = counts < least
        self._codes = mixed(np.arange(len(self._numbers) + 1, dtype=np.uint64) * GOLDEN)
        grams = np.rint(n * lengths / np.maximum(counts, 1)).astype(np.int64)  # more than n words of letters of Thai
        sizes = np.where(self.too_short, 0, np.minimum(lengths, grams))
        self._grams: dict[int, tuple[np.ndarray, np.ndarray]] = {}  # of each size: hashes, sorted, and their places
        for size, hashes in _hashes(self._codes[self._words], set(sizes[sizes > 0].tolist())):
            windows = np.where(sizes == size, lengths - size + 1, 0)
            places = np.repeat(self._starts[:-1] - np.cumsum(windows) + windows, windows) + np.arange(windows.sum())
            places = places[np.argsort(hashes[places], kind="stable")]
            self._grams[size] = hashes[places], places
        self._windows = np.where(self.too_short, 0, lengths - sizes + 1)

    def items_in(self, text: str) -> list[int]:
        """Numbers of the texts that share an n-gram with a document, ascending."""
        places = sorted(set(self.places_in(text)))
        result: list[int] = np.unique(np.searchsorted(self._starts, places, side="right") - 1).tolist()
        return result

    def shares(self, met: np.ndarray) -> list[float | None]:
        """Of each text the share of its n-grams that were met; None where it is too short. met: (places,) bool."""
        return [float(met[start:start + count].mean()) if count else None
                for start, count in zip(self._starts[:-1], self._windows, strict=True)]

    def places_in(self, text: str) -> list[int]:
        """Places of the n-grams that a document contains, each as often as it occurs."""
        words = comparable_words(text)
        known = np.fromiter(map(self._numbers.get, words, repeat(0)), np.int64, len(words))
        codes, unknown = self._codes[known], np.concatenate([[0], np.cumsum(known == 0)])
        result: list[int] = []
        for size, hashes in _hashes(codes, set(self._grams)):
            there, places = self._grams[size]
            all_known = np.flatnonzero(unknown[size:] == unknown[:-size])  # windows whose words all occur in items
            low, high = (np.searchsorted(there, hashes[all_known], side=side) for side in ("left", "right"))
            for at in np.flatnonzero(high > low):
                window = known[all_known[at]:all_known[at] + size]
                result += [int(place) for place in places[low[at]:high[at]]
                          if np.array_equal(window, self._words[place:place + size])]
        return result


def _hashes(codes: np.ndarray, sizes: set[int]) -> Iterator[tuple[int, np.ndarray]]:
    """For each size up to the number of codes, ascending, the hashes of all windows: sum(code_j GOLDEN^(size - 1 - j))
    modulo 2^64."""
    hashes = np.zeros(len(codes) + 1, np.uint64)
    for size in range(1, min(max(sizes, default=0), len(codes)) + 1):
        hashes = hashes[:-1] * GOLDEN + codes[size - 1:]
        if size in sizes:
            yield size, hashes
