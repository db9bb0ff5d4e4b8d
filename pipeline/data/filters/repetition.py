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
