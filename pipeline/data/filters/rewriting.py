"""Filters that change texts and drop nothing: private details masked, one form of characters and white space, texts put
right that were decoded in a wrong encoding."""

from __future__ import annotations

import re
import unicodedata
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network
from typing import Literal

from pydantic import Field, field_validator

from drover.pipeline.config.section import Section
from drover.pipeline.data.documents import Document
from drover.pipeline.data.filters.base import Filter

_EMAIL = re.compile(r"(?<![\w.%+-])[\w.%+-]{1,64}@(?:[A-Za-z0-9-]{1,63}\.){1,8}[A-Za-z]{2,24}(?!\w)")
_OCTET = r"(?:25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
_IPV4 = re.compile(rf"(?<![\w.]){_OCTET}(?:\.{_OCTET}){{3}}(?!\w|\.\w)")
_IPV6 = re.compile(r"(?<![\w:.])[0-9A-Fa-f]{0,4}(?::[0-9A-Fa-f]{0,4}){3,7}(?![\w:])")
"""Three colons at least: fewer are a slice ([1::2]), a time or a scope (std::vector) more often than an address."""
_NOBODYS = [ip_network(text) for text in (
    "0.0.0.0/8", "10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "169.254.0.0/16", "172.16.0.0/12", "192.0.2.0/24",
    "192.168.0.0/16", "198.18.0.0/15", "198.51.100.0/24", "203.0.113.0/24", "224.0.0.0/3",
    "::/127", "fc00::/7", "fe80::/10", "ff00::/8", "2001:db8::/32")]
"""Loopback, private networks, examples, groups: they lead to nobody. Python's own list changes with its version."""


class Pattern(Section):
    """An expression and what replaces it."""

    find: str
    """A regular expression of Python's `re`."""
    mask: str
    """Replaces each match, literally."""

    @field_validator("find")
    @classmethod
    def _compiles(cls, text: str) -> str:
        try:
            compiled = re.compile(text)
        except re.error as error:
            raise ValueError(f"it is no regular expression: {error}") from None
        if compiled.match(""):
            raise ValueError("it matches the empty text, and would put a mask everywhere")
        return text


class Masking(Filter):
    """Replaces e-mail addresses, IP addresses and what `patterns` find; drops nothing.

    It goes by form alone: a version number of four parts is an IP address to it.
    """

    email: str | None = "<email>"
    """Replaces e-mail addresses; null: they stay."""
    ip: str | None = "<ip>"
    """Replaces IP addresses of version 4 and 6; null: they stay. Addresses of private networks, of this machine and of
    examples (192.168.0.1, 127.0.0.1, 2001:db8::1) identify nobody and always stay."""
    patterns: list[Pattern] = []
    """More to replace, in this order, after these: [{find: "[0-9]{3}-[0-9]{2}-[0-9]{4}", mask: "<number>"}]."""

    def __call__(self, document: Document) -> Document | str:
        text = document.text
        if (mask := self.email) is not None and "@" in text:
            text = _EMAIL.sub(lambda matched: mask, text)
        if self.ip is not None:
            text = _IPV4.sub(self._ip_or_itself, text)
            text = _IPV6.sub(self._ip_or_itself, text)
        for pattern in self.patterns:
            text = re.sub(pattern.find, lambda matched, put=pattern.mask: put, text)  # type: ignore[misc]
        return document.with_text(text)

    def _ip_or_itself(self, matched: re.Match[str]) -> str:
        try:
            address: IPv4Address | IPv6Address = ip_address(matched[0])
        except ValueError:
            return matched[0]
        return matched[0] if self.ip is None or any(address in network for network in _NOBODYS) else self.ip


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
            text = re.sub(rf"(\n(?:[^\S\n]*\n){{{self.max_blank_lines}}})(?:[^\S\n]*\n)+", r"\1", text)
        return document.with_text(text)


class EncodingRepair(Filter):
    """Puts texts right that were decoded in a wrong encoding ("schÃ¶n" for "schön"), by ftfy; drops nothing.

    Only what hardly can be meant is changed, line by line. Quotes, widths, ligatures and line ends stay as they are:
    the filter `normalization` is for these.
    """

    needs = "ftfy"

    def __call__(self, document: Document) -> Document | str:
        if document.text.isascii():
            return document
        import ftfy
        return document.with_text(ftfy.fix_text(
            document.text, unescape_html=False, remove_terminal_escapes=False, fix_latin_ligatures=False,
            fix_character_width=False, uncurl_quotes=False, fix_line_breaks=False, remove_control_chars=False,
            normalization=None, explain=False))
