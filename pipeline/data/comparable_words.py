"""Texts as they are compared where spelling, case and punctuation are not to matter."""

from __future__ import annotations

import re
import unicodedata

_WORD = re.compile(r"[^\W_]+")


def comparable_words(text: str) -> list[str]:
    """The words of a text, runs of letters and digits, in Unicode's NFKC and with their case folded."""
    return _WORD.findall((text if text.isascii() else unicodedata.normalize("NFKC", text)).casefold())
