"""Texts as they are compared where spelling, case, punctuation and layout are not to matter."""

from __future__ import annotations

import html
import re
import unicodedata

_WORD = re.compile(r"[^\W_]+")
_LETTERS = ("\u0e01-\u0e3a\u0e40-\u0e4e\u0e81-\u0ece"                # Thai, Lao
            "\u1000-\u103f\u1050-\u109f\u1780-\u17d3")               # Burmese, Khmer
WITHOUT_SPACES = (_LETTERS + "\u3005-\u3007\u3041-\u3096\u309d-\u309f"  # iteration marks and zero, hiragana
                  "\u30a1-\u30fa\u30fc-\u30ff\u31f0-\u31ff\uff66-\uff9f"  # katakana
                  "\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003fffd")  # Han
"""Letters of scripts that put no spaces between words, with their vowel signs and marks."""
_CHARACTER = re.compile(f"[{WITHOUT_SPACES}]")
_CHARACTER_OR_WORD = re.compile(f"{_CHARACTER.pattern}|[^\\W_{WITHOUT_SPACES}]+")
_LETTER = re.compile(f"[{_LETTERS}]")
_INVISIBLE = "\u00ad\u2060\ufeff"
"""Soft hyphens, word joiners and byte order marks, which stand inside of words."""


def comparable_words(text: str) -> list[str]:
    """The words of a text, runs of letters and digits, in Unicode's NFKC and with their case folded. In scripts that
    put no spaces between words, each character is one. HTML's entities (&nbsp;, &amp;) are the characters that they
    mean; soft hyphens and the like are left out."""
    if "&" in text:
        text = html.unescape(text)
    if not text.isascii():
        for character in _INVISIBLE:
            text = text.replace(character, "")
        text = unicodedata.normalize("NFKC", text)
        if _CHARACTER.search(text):
            return _CHARACTER_OR_WORD.findall(text.casefold())
    return _WORD.findall(text.casefold())


def length_in_words(words: list[str]) -> float:
    """The length of a text of `comparable_words` in words: three letters of Thai and the like are about one."""
    letters = sum(map(bool, map(_LETTER.match, words)))
    return len(words) - 2 * letters / 3
