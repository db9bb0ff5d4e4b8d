"""Documents that repeat lines many times: menus, footers, logs, lists made by programs."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np
from pydantic import Field

from drover.pipeline.data.documents import Document
from drover.pipeline.data.filters.base import Filter
from drover.pipeline.data.filters.quality import Ratio, words


class Repetition(Filter):
    """Drops documents in which too many lines repeat an earlier line of the same document.

    Lines are compared without the white space around them; empty lines do not count. The defaults are those of Gopher
    (Rae et al. 2021, table A1) for repeated lines.
    """

    max_lines: float = Field(0.3, ge=0, le=1)
    """Share of a document's lines that may be repetitions; 1: any."""
    max_characters: float = Field(0.2, ge=0, le=1)
    """Share of its lines' characters that may be in repetitions; 1: any."""

    def __call__(self, document: Document) -> Document | str:
        lines = [line for raw in document.text.splitlines() if (line := raw.strip())]
        return too_repetitive(lines, sum(map(len, lines)), self.max_lines, self.max_characters, "lines") or document


def too_repetitive(parts: list[str], characters: int, most: float | None, max_characters: float | None,
                   what: str) -> str | None:
    """Why too many parts of a text, or too long ones, repeat earlier parts; None if not.

    Args:
        characters: of the text. what: the name of the parts.
        most, max_characters: largest shares of the parts, and of the characters; None: any.
    """
    if len(set(parts)) == len(parts):
        return None
    counts = Counter(parts)
    if most is not None and (len(parts) - len(counts)) / len(parts) > most:
        return f"more than {most:g} of the {what} are repetitions"
    again = sum(len(part) * (count - 1) for part, count in counts.items())
    if max_characters is not None and again / characters > max_characters:
        return f"more than {max_characters:g} of the characters are in repeated {what}"
    return None


_BETWEEN_PARAGRAPHS = re.compile(r"\n{2,}")


class GopherRepetition(Filter):
    """Drops documents that repeat too much of their text (Rae et al. 2021, table A1).

    Settings, defaults and the order of the rules are those of datatrove's GopherRepetitionFilter, whose top_n_grams and
    dup_n_grams are here a setting for each n. A setting is the largest share that passes; null turns its rule off. The
    shares for runs of words are of the document's characters.
    """

    dup_para_frac: Ratio = 0.3
    """Share of the paragraphs that repeat an earlier one."""
    dup_para_char_frac: Ratio = 0.2
    """Share of the characters that are in paragraphs which repeat an earlier one."""
    dup_line_frac: Ratio = 0.3
    """Share of the lines that repeat an earlier one."""
    dup_line_char_frac: Ratio = 0.2
    """Share of the characters that are in lines which repeat an earlier one."""
    top_2_gram: Ratio = 0.20
    """Share of the most frequent run of 2 words: its length times how often it occurs."""
    top_3_gram: Ratio = 0.18
    """Share of the most frequent run of 3 words."""
    top_4_gram: Ratio = 0.16
    """Share of the most frequent run of 4 words."""
    dup_5_gram: Ratio = 0.15
    """Share of runs of 5 words that repeat an earlier run; characters in overlapping runs count once."""
    dup_6_gram: Ratio = 0.14
    """Share of runs of 6 words that repeat an earlier run."""
    dup_7_gram: Ratio = 0.13
    """Share of runs of 7 words that repeat an earlier run."""
    dup_8_gram: Ratio = 0.12
    """Share of runs of 8 words that repeat an earlier run."""
    dup_9_gram: Ratio = 0.11
    """Share of runs of 9 words that repeat an earlier run."""
    dup_10_gram: Ratio = 0.10
    """Share of runs of 10 words that repeat an earlier run."""

    def __call__(self, document: Document) -> Document | str:
        text = document.text
        paragraphs = _BETWEEN_PARAGRAPHS.split(text.strip())
        if reason := too_repetitive(paragraphs, len(text), self.dup_para_frac, self.dup_para_char_frac, "paragraphs"):
            return reason
        # A text that begins or ends with a line end has an empty line there.
        lines = [*filter(None, text.split("\n")), *([""] * (text[0] == "\n")), *([""] * (text[-1] == "\n"))]
        if reason := too_repetitive(lines, len(text), self.dup_line_frac, self.dup_line_char_frac, "lines"):
            return reason
        runs = WordRuns(words(text))
        for n, most in self._limits("top", 2, 4):
            if runs.top_is_above(n, most, len(text)):
                return f"more than {most:g} of the characters are one run of {n} words"
        for n, most in self._limits("dup", 5, 10):
            if runs.repeated_are_above(n, most, len(text)):
                return f"more than {most:g} of the characters are in repeated runs of {n} words"
        return document

    def _limits(self, rule: str, first: int, last: int) -> Iterator[tuple[int, float]]:
        limits = ((n, getattr(self, f"{rule}_{n}_gram")) for n in range(first, last + 1))
        return ((n, most) for n, most in limits if most is not None)


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
