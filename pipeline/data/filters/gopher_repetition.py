"""The rules of Gopher for repetition within a page, as datatrove has them (GopherRepetitionFilter)."""

from __future__ import annotations

import re
from collections.abc import Iterator

from drover.pipeline.data.documents import Document
from drover.pipeline.data.filters.base import Filter
from drover.pipeline.data.filters.gopher_quality import Ratio
from drover.pipeline.data.filters.repetition import too_repetitive
from drover.pipeline.data.filters.word_runs import WordRuns
from drover.pipeline.data.filters.words import words

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
