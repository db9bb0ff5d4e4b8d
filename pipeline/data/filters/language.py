"""Documents in unwanted languages, recognized by a fastText model that you give."""

from __future__ import annotations

from collections import Counter
from functools import cached_property

from pydantic import Field

from drover.pipeline.config.section import added
from drover.pipeline.data.documents import Document
from drover.pipeline.data.filters.classifier import FastText

_UNKNOWN = "unknown"


class Language(FastText):
    """Drops documents in other languages than `languages`, and those whose language the model is not sure of.

    A fastText model labels the text as one line; its most probable label decides. Any model that recognizes languages
    can be used: lid.176.ftz or lid.176.bin, whose labels have two letters, or GlotLID's, with labels like eng_Latn.
    """

    languages: list[str] = Field(min_length=1)
    """Labels that are kept, as the model writes them, without __label__: [en, de], or [eng_Latn]."""
    min_probability: float = Field(0.65, ge=0, le=1)
    """Least probability of the most probable language."""
    min_share: float | None = added(None, gt=0, le=1)
    """For documents of mixed languages: label each line, and keep documents with at least this share of their
    characters in lines of `languages`. null: label the text as a whole."""

    def open(self) -> None:
        """See Filter."""
        self.refuse_unknown("languages", self.languages)

    _last: str = ""

    @cached_property
    def _seen(self) -> Counter[str]:
        return Counter()

    @cached_property
    def _left(self) -> Counter[str]:
        return Counter()

    def kept(self) -> None:
        """Count the language of a document that all filters keep."""
        self._left[self._last] += 1

    def findings(self) -> dict[str, dict[str, int]]:
        """Documents by language, with `min_share` by that of most characters; `unknown` counts those whose language the
        model was not sure of. And how many in each of `languages` that it saw all filters keep."""
        return {"languages": dict(sorted(self._seen.items())), "languages_kept": {
            name: self._left[name] for name in self.languages if self._seen[name]}} if self._seen else {}

    def __call__(self, document: Document) -> Document | str:
        text = document.text
        lines = [line for line in text.split("\n") if line.strip()] if self.min_share else []
        characters = Counter[str]()
        for part in lines or [text]:
            characters[self._language(part)] += len(part)
        [(language, _)] = characters.most_common(1)
        self._seen[language] += 1
        self._last = language
        wanted = sum(characters[name] for name in set(self.languages))
        if wanted >= (self.min_share or 1) * characters.total():
            return document
        if self.min_share:
            return f"fewer than {self.min_share:g} of the characters in wanted languages"
        return f"of no language with a probability of {self.min_probability:g}" if language == _UNKNOWN else \
            "of another language"

    def _language(self, text: str) -> str:
        """The text's most probable language; `unknown` if the model is not sure."""
        [(language, probability)] = self.probabilities(text, 1).items() or [("", 0.0)]
        return language if probability >= self.min_probability else _UNKNOWN
