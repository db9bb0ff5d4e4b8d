"""The rules of C4 for lines and pages, as datatrove has them (C4QualityFilter)."""

from __future__ import annotations

import re

from pydantic import Field

from drover.pipeline.data.documents import Document
from drover.pipeline.data.filters.base import Filter
from drover.pipeline.data.filters.words import sentences

_CITATION = re.compile(r"\[(?:\d*|edit|citation needed)\]")
_ENDS = (".", "?", "!", '"', "'")
_POLICIES = ("terms of use", "privacy policy", "cookie policy", "uses cookies", "use of cookies", "use cookies")


class C4(Filter):
    """Takes lines that are no prose out of documents, and drops documents of which too little is left, or that hold
    code or a dummy text (Raffel et al. 2020, section 2.2).

    Settings, defaults and the order of the rules are those of datatrove's C4QualityFilter, with split_paragraph;
    null leaves a rule out. Lines that stay lose the white space around them.
    """

    remove_citations: bool = True
    """Take out marks such as [12], [edit] and [citation needed]."""
    filter_no_terminal_punct: bool = True
    """Take out lines that do not end with one of . ? ! " ', or that end with three dots."""
    min_num_sentences: int | None = Field(5, gt=0)
    """Sentences that are left at least."""
    min_words_per_line: int | None = Field(3, gt=0)
    """Take out lines with fewer words (what white space separates, before citations go)."""
    max_word_length: int | None = Field(1000, gt=0)
    """Take out lines with a longer word."""
    filter_lorem_ipsum: bool = True
    """Drop documents with "lorem ipsum" in a line that is not taken out for its form."""
    filter_javascript: bool = True
    """Take out lines that name JavaScript."""
    filter_curly_bracket: bool = True
    """Drop documents with { in a line that is not taken out for its form or for JavaScript."""
    filter_policy: bool = True
    """Take out lines about cookies, privacy policies and terms of use."""

    def __call__(self, document: Document) -> Document | str:
        number, kept = 0, []
        for raw in document.text.splitlines():
            if (line := self._in_form(raw.strip())) is None:
                continue
            lowered = line.lower()
            if self.filter_lorem_ipsum and "lorem ipsum" in lowered:
                return "lorem ipsum"
            if self.filter_javascript and "javascript" in lowered:
                continue
            if self.filter_curly_bracket and "{" in line:
                return "a curly bracket"
            if self.filter_policy and any(policy in lowered for policy in _POLICIES):
                continue
            if self.min_num_sentences and number < self.min_num_sentences:  # more need not be counted
                number += sentences(line)
            kept.append(line)
        if self.min_num_sentences and number < self.min_num_sentences:
            return f"fewer than {self.min_num_sentences:,} sentences are left"
        text = "\n".join(kept).strip()
        return document.with_text(text)

    def _in_form(self, line: str) -> str | None:
        """A line without citations; None where its form is not that of prose."""
        bare = _CITATION.sub("", line) if self.remove_citations and "[" in line else line
        if self.filter_no_terminal_punct and (not bare.endswith(_ENDS) or bare.endswith("...")):
            return None
        if self.min_words_per_line and len(line.split(None, self.min_words_per_line)) < self.min_words_per_line:
            return None
        if (most := self.max_word_length) and len(line) > most and any(len(word) > most for word in line.split()):
            return None
        return bare
