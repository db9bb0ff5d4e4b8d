"""The rules that FineWeb adds for lists and menus, as datatrove has them (FineWebQualityFilter)."""

from __future__ import annotations

from collections import Counter

from pydantic import Field

from drover.pipeline.data.documents import Document
from drover.pipeline.data.filters.base import Filter
from drover.pipeline.data.filters.words import TERMINAL, words


class FinewebQuality(Filter):
    """Drops documents whose lines are those of lists, menus and tables (Penedo et al. 2024, section 3.6).

    Settings, defaults and the order of the rules are those of datatrove's FineWebQualityFilter. Blank lines do not
    count.
    """

    line_punct_thr: float = Field(0.12, ge=0, le=1)
    """Least share of lines that end a sentence: their last character is a terminal mark of any script."""
    line_punct_exclude_zero: bool = False
    """Let documents pass that have no such line at all."""
    short_line_thr: float = Field(0.67, ge=0, le=1)
    """Largest share of lines that have short_line_length characters or fewer."""
    short_line_length: int = Field(30, ge=0)
    """Most characters of a short line."""
    char_duplicates_ratio: float = Field(0.01, ge=0, le=1)
    """Largest share of characters in lines that repeat an earlier line."""
    new_line_ratio: float = Field(0.3, ge=0)
    """Most line ends for each word."""

    def __call__(self, document: Document) -> Document | str:
        text = document.text
        lines = [line for line in text.split("\n") if line and not line.isspace()]
        ended = sum(line[-1] in TERMINAL for line in lines) / len(lines)
        if ended < self.line_punct_thr and not (ended == 0 and self.line_punct_exclude_zero):
            return f"fewer than {self.line_punct_thr:g} of the lines end a sentence"
        if sum(len(line) <= self.short_line_length for line in lines) / len(lines) > self.short_line_thr:
            return f"more than {self.short_line_thr:g} of the lines are short"
        counts, line_ends = Counter(lines), text.count("\n")
        repeated = sum(len(line) * (count - 1) for line, count in counts.items()) if len(counts) < len(lines) else 0
        if repeated / (len(text) - line_ends) > self.char_duplicates_ratio:
            return f"more than {self.char_duplicates_ratio:g} of the characters are in repeated lines"
        # There is a word at least between two white spaces: counting those is enough for most.
        if line_ends / len(text.split()) > self.new_line_ratio and line_ends / len(words(text)) > self.new_line_ratio:
            return f"more than {self.new_line_ratio:g} line ends for each word"
        return document
