"""Documents that are too short or too long."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

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

    @model_validator(mode="after")
    def _has_bounds(self) -> Self:
        bounds = [(self.min_characters, self.max_characters), (self.min_words, self.max_words)]
        if not any(bound for pair in bounds for bound in pair):
            raise ValueError("a length filter needs one of min_characters, max_characters, min_words, max_words")
        if any(least and most and least > most for least, most in bounds):
            raise ValueError("no document is that long: the least is more than the most")
        return self

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
