"""Documents that are too short or too long, or made of the wrong kinds of characters (tables of numbers,
encoded data)."""

from __future__ import annotations

import unicodedata
from collections import Counter
from typing import Annotated, Literal

from pydantic import Field

from drover.pipeline.data.documents import Document
from drover.pipeline.data.filters.base import Filter


class Length(Filter):
    """Drops documents with too few or too many characters or words. Every bound that is given holds."""

    min_characters: int | None = Field(None, gt=0)
    """Characters (code points) that a document has at least; null: no bound."""
    max_characters: int | None = Field(None, gt=0)
    """Characters that a document has at most; null: no bound."""
    min_words: int | None = Field(None, gt=0)
    """Words (what white space separates) that a document has at least; null: no bound."""
    max_words: int | None = Field(None, gt=0)
    """Words that a document has at most; null: no bound."""

    def __call__(self, document: Document) -> Document | str:
        for what, least, most in (("characters", self.min_characters, self.max_characters),
                                  ("words", self.min_words, self.max_words)):
            if not least and not most:
                continue
            count = len(document.text if what == "characters" else document.text.split())
            if least and count < least:
                return f"fewer than {least:,} {what}"
            if most and count > most:
                return f"more than {most:,} {what}"
        return document


CharacterClass = Literal["letters", "digits", "punctuation", "symbols", "control"]
Share = Annotated[float, Field(ge=0, le=1)]

_OF_CATEGORY: dict[str, CharacterClass] = {"L": "letters", "M": "letters", "N": "digits", "P": "punctuation",
                                           "S": "symbols", "C": "control"}
"""By the first letter of Unicode's general category. Z, which is missing, is white space."""


class Characters(Filter):
    """Drops documents that have too many or too few characters of a class.

    Classes are Unicode's: letters (with combining marks), digits (all numbers), punctuation, symbols (with U+FFFD,
    which marks text that was decoded wrongly) and control (with unassigned characters). White space does not count, so
    that indentation changes no share.
    """

    min_share: dict[CharacterClass, Share] = {}
    """The least share of each class that is named: {letters: 0.5}."""
    max_share: dict[CharacterClass, Share] = {}
    """The largest share of each class that is named: {digits: 0.3, control: 0}."""

    def __call__(self, document: Document) -> Document | str:
        counts, total = Counter[str](), 0
        for character, count in Counter(document.text).items():  # a category a character, not one a place
            if character.isspace():
                continue
            total += count
            counts[_OF_CATEGORY.get(unicodedata.category(character)[0], "")] += count
        # In an order of its own: that in which they are written decides nothing, the first reason included.
        for name, share in sorted(self.min_share.items()):
            if counts[name] < share * total:
                return f"fewer than {share:g} {name}"
        for name, share in sorted(self.max_share.items()):
            if counts[name] > share * total:
                return f"more than {share:g} {name}"
        return document
