"""Texts in one form: of characters, line ends and white space."""

from __future__ import annotations

import re
import unicodedata
from functools import cached_property
from typing import Literal

from pydantic import Field

from drover.pipeline.data.documents import Document
from drover.pipeline.data.filters.base import Filter

_ZERO_WIDTH = str.maketrans("", "", "\u200b\u2060\ufeff\u00ad")
_CONTROL = str.maketrans("", "", "".join(chr(code) for code in (*range(0x20), *range(0x7F, 0xA0))
                                         if chr(code) not in "\t\n\f\r\x85"))
_TRAILING = re.compile(r"(?<![^\S\n])[^\S\n]++$", re.MULTILINE)  # from a run's begin only: linear


class Normalization(Filter):
    """Brings texts into one form, each setting another part of it, in the order of the settings; drops nothing."""

    form: Literal["NFC", "NFKC"] | None = None
    """Unicode's form. NFC makes one character of a letter and its accents and changes no meaning; NFKC also writes
    wide, small, raised and joined characters plainly (ﬁ as fi, ² as 2)."""
    line_ends: bool = False
    """Write all line ends (\\r\\n, \\r) as \\n."""
    control_characters: bool = False
    """Take out control characters, but for tabs, line ends and form feeds."""
    zero_width: bool = False
    """Take out zero-width spaces, word joiners, byte order marks and soft hyphens. Joiners stay: they make emojis, and
    are part of the spelling in several scripts."""
    trailing_space: bool = False
    """Take out white space before line ends and at the text's end, and line ends there."""
    max_blank_lines: int | None = Field(None, ge=0)
    """Leave so many of the blank lines that follow each other; null: all."""

    @cached_property
    def _blank(self) -> re.Pattern[str]:
        assert self.max_blank_lines is not None
        return re.compile(rf"(\n(?:[^\S\n]*\n){{{self.max_blank_lines}}})(?:[^\S\n]*\n)+")

    def __call__(self, document: Document) -> Document | str:
        text = document.text
        if self.form is not None and not unicodedata.is_normalized(self.form, text):
            text = unicodedata.normalize(self.form, text)
        if self.line_ends and "\r" in text:
            text = text.replace("\r\n", "\n").replace("\r", "\n")
        if self.control_characters:
            text = text.translate(_CONTROL)
        if self.zero_width and not text.isascii():
            text = text.translate(_ZERO_WIDTH)
        if self.trailing_space:
            text = _TRAILING.sub("", text).rstrip()
        if self.max_blank_lines is not None:
            text = self._blank.sub(r"\1", text)
        return document.with_text(text)
