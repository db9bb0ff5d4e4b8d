"""Documents that repeat lines many times: menus, footers, logs, lists made by programs."""

from __future__ import annotations

from collections import Counter

from pydantic import Field

from drover.pipeline.data.documents import Document
from drover.pipeline.data.filters.base import Filter


class Repetition(Filter):
    """Drops documents in which too many lines repeat an earlier line of the same document.

    Lines are compared without the white space around them; empty lines do not count. The defaults are those of Gopher
    (Rae et al. 2021, table A1) for repeated lines.
    """

    most_lines: float = Field(0.3, ge=0, le=1)
    """Share of a document's lines that may be repetitions; 1: any."""
    most_characters: float = Field(0.2, ge=0, le=1)
    """Share of its lines' characters that may be in repetitions; 1: any."""

    def __call__(self, document: Document) -> Document | str:
        lines = [line for raw in document.text.splitlines() if (line := raw.strip())]
        counts = Counter(lines)
        if len(lines) - len(counts) > self.most_lines * len(lines):
            return f"more than {self.most_lines:g} of the lines are repetitions"
        repeated = sum(len(line) * (count - 1) for line, count in counts.items())
        if repeated > self.most_characters * sum(map(len, lines)):
            return f"more than {self.most_characters:g} of the characters are in repeated lines"
        return document
