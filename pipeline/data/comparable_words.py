"""Texts as they are compared where spelling, case, punctuation and layout are not to matter."""

from __future__ import annotations

import html
import re
import unicodedata

_WORD = re.compile(r"[^\W_]+")
_INVISIBLE = str.maketrans("", "", "\u00ad\u2060\ufeff")
"""Soft hyphens, word joiners and byte order marks, which stand inside of words."""


def comparable_words(text: str) -> list[str]:
    """The words of a text, runs of letters and digits, in Unicode's NFKC and with their case folded. HTML's entities
    (&nbsp;, &amp;) are the characters that they mean; soft hyphens and the like are left out."""
    if "&" in text:
        text = html.unescape(text)
    if not text.isascii():
        text = unicodedata.normalize("NFKC", text.translate(_INVISIBLE))
    return _WORD.findall(text.casefold())
