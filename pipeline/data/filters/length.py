"""Documents that are too short or too long."""

from __future__ import annotations

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
