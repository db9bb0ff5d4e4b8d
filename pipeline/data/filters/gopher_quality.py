"""The rules of Gopher by which a page is prose, as datatrove has them (GopherQualityFilter)."""

from __future__ import annotations

from functools import cached_property
from typing import Annotated

from pydantic import Field

from drover.pipeline.data.documents import Document
from drover.pipeline.data.filters.base import Filter
from drover.pipeline.data.filters.words import NO_WORD, word_counts

Ratio = Annotated[float | None, Field(gt=0)]


class GopherQuality(Filter):
    """Drops documents that break a rule of quality of Gopher (Rae et al. 2021, appendix A1.1).

    Settings, defaults and the order of the rules are those of datatrove's GopherQualityFilter; null leaves a rule out.
    The stop words are English: give those of your language, or null for min_stop_words.
    """

    min_doc_words: int | None = Field(50, gt=0)
    """Words that a document has at least. Those of nothing but punctuation do not count, here and for the lengths."""
    max_doc_words: int | None = Field(100_000, gt=0)
    """Words that a document has at most."""
    min_avg_word_length: Ratio = 3
    """Characters of a word, on average, at least."""
    max_avg_word_length: Ratio = 10
    """Characters of a word, on average, at most."""
    max_symbol_word_ratio: Ratio = 0.1
    """The signs # for each word, punctuation included, and the ellipses (... or …), at most."""
    max_bullet_lines_ratio: Ratio = 0.9
    """Share of lines that begin with • or - at most."""
    max_ellipsis_lines_ratio: Ratio = 0.3
    """Share of lines that end in an ellipsis at most."""
    min_alpha_words_ratio: Ratio = 0.8
    """Share of words, punctuation included, that have a letter at least. datatrove calls it
    max_non_alpha_words_ratio."""
    min_stop_words: int | None = Field(2, gt=0)
    """How many of the stop_words occur at least."""
    stop_words: list[str] = ["the", "be", "to", "of", "and", "that", "have", "with"]
    """Words of which min_stop_words are in any prose of the language, as they are written."""

    @cached_property
    def _stop_words(self) -> frozenset[str]:
        return frozenset(self.stop_words)

    def __call__(self, document: Document) -> Document | str:
        return self._of_words(document.text) or self._of_lines(document.text) or self._of_letters(document.text) \
            or document

    def _of_words(self, text: str) -> str | None:
        counts = word_counts(text)
        words = sum(counts.values())
        number = characters = 0
        for word, count in counts.items():
            if not NO_WORD.issuperset(word):
                number += count
                characters += count * len(word)
        if self.min_doc_words and number < self.min_doc_words:
            return f"fewer than {self.min_doc_words:,} words"
        if self.max_doc_words and number > self.max_doc_words:
            return f"more than {self.max_doc_words:,} words"
        if number and self.min_avg_word_length and characters / number < self.min_avg_word_length:
            return f"words shorter than {self.min_avg_word_length:g} characters on average"
        if number and self.max_avg_word_length and characters / number > self.max_avg_word_length:
            return f"words longer than {self.max_avg_word_length:g} characters on average"
        if (most := self.max_symbol_word_ratio) and text.count("#") / words > most:
            return f"more than {most:g} # for each word"
        if most and (text.count("...") + text.count("…")) / words > most:
            return f"more than {most:g} ellipses for each word"
        return None

    def _of_lines(self, text: str) -> str | None:
        lines = text.splitlines()
        if most := self.max_bullet_lines_ratio:
            bullets = sum(line.lstrip().startswith(("•", "-")) for line in lines) if "•" in text or "-" in text else 0
            if bullets / len(lines) > most:
                return f"more than {most:g} of the lines begin with a bullet"
        if most := self.max_ellipsis_lines_ratio:
            ends = sum(line.rstrip().endswith(("...", "…")) for line in lines) if "..." in text or "…" in text else 0
            if ends / len(lines) > most:
                return f"more than {most:g} of the lines end in an ellipsis"
        return None

    def _of_letters(self, text: str) -> str | None:
        counts = word_counts(text)
        if least := self.min_alpha_words_ratio:
            lettered = sum(count for word, count in counts.items()
                           if word.isalpha() or any(map(str.isalpha, word)))
            if lettered / sum(counts.values()) < least:
                return f"fewer than {least:g} of the words have a letter"
        if self.min_stop_words and sum(word in counts for word in self._stop_words) < self.min_stop_words:
            return f"fewer than {self.min_stop_words:,} of the stop words"
        return None
