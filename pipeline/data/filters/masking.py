"""Private details in texts, replaced by a mark: e-mail addresses, IP addresses, and what your own expressions find."""

from __future__ import annotations

import re
from functools import cached_property
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network

from pydantic import field_validator

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

    @cached_property
    def _compiled(self) -> list[tuple[re.Pattern[str], str]]:
        return [(re.compile(pattern.find), pattern.mask) for pattern in self.patterns]

    def __call__(self, document: Document) -> Document | str:
        text = document.text
        if (mask := self.email) is not None and "@" in text:
            text = _EMAIL.sub(lambda matched: mask, text)
        if self.ip is not None:
            text = _IPV4.sub(self._ip_or_itself, text)
            text = _IPV6.sub(self._ip_or_itself, text)
        for pattern, own_mask in self._compiled:
            text = pattern.sub(lambda matched, put=own_mask: put, text)  # type: ignore[misc]
        return document.with_text(text)

    def _ip_or_itself(self, matched: re.Match[str]) -> str:
        try:
            address: IPv4Address | IPv6Address = ip_address(matched[0])
        except ValueError:
            return matched[0]
        return matched[0] if self.ip is None or any(address in network for network in _NOBODYS) else self.ip
