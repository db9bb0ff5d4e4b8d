"""Texts that were decoded in a wrong encoding, put right."""

from __future__ import annotations

from functools import cached_property
from typing import Any

from drover.pipeline.data.documents import Document
from drover.pipeline.data.filters.base import Filter


class EncodingRepair(Filter):
    """Puts texts right that were decoded in a wrong encoding ("schÃ¶n" for "schön"), by ftfy; drops nothing.

    Only what hardly can be meant is changed, line by line. Quotes, widths, ligatures and line ends stay as they are:
    the filter `normalization` is for these.
    """

    needs = "ftfy"

    entities: bool = False
    """Also write HTML's entities (&amp;) as the characters that they mean, in lines without a < ."""

    @cached_property
    def _settings(self) -> Any:
        import ftfy
        return ftfy.TextFixerConfig(
            unescape_html="auto" if self.entities else False, remove_terminal_escapes=False, fix_latin_ligatures=False,
            fix_character_width=False, uncurl_quotes=False, fix_line_breaks=False, remove_control_chars=False,
            normalization=None, explain=False)

    def __call__(self, document: Document) -> Document | str:
        if document.text.isascii() and not self.entities:
            return document
        import ftfy
        text = ftfy.fix_text(document.text, self._settings)
        return document.with_text(text)
