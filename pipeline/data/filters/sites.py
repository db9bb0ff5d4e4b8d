"""Pages of sites that are unwanted, or the only ones wanted."""

from __future__ import annotations

import re
from typing import Annotated, Self
from urllib.parse import urlsplit

from pydantic import Field, model_validator

from drover.pipeline.core.errors import UserError
from drover.pipeline.data.documents import Document
from drover.pipeline.data.filters.base import Filter

Domain = Annotated[str, Field(pattern=r"^[\w-]+(\.[\w-]+)*$")]


class Site(Filter):
    """Drops pages by the site in their URL.

    A domain means all below it, too: `example.org` also means `www.example.org`, and `org` every site that ends so. Of
    `drop` and `keep` at least one is given.
    """

    drop: list[Domain] = []
    """Domains whose pages are dropped: [example.org, ads.example.com]."""
    keep: list[Domain] = []
    """If there are any, pages of all other domains are dropped, and those without a URL: [edu, example.org]."""
    field: str = "url"
    """The field of the document's metadata that holds the URL. Pages of WARC files have `url`; other sources need it
    in `meta_fields`. So do HTML files if some of them do not name theirs."""

    @model_validator(mode="after")
    def _names_some(self) -> Self:
        if not self.drop and not self.keep:
            raise ValueError("give the domains to drop or to keep, as in drop: [example.org]")
        return self

    def __call__(self, document: Document) -> Document | str:
        if self.field not in document.meta:
            raise UserError(f"the document has no {self.field}: name it in meta_fields of the source "
                            f"{document.source}, or give the filter `sources` without that one")
        host = _host(str(document.meta[self.field] or ""))
        if self.keep and not _is_of(host, self.keep):
            return "of no site to keep" if host else "without a URL"
        return "of a site to drop" if _is_of(host, self.drop) else document


def _host(url: str) -> str:
    """The name of the host in a URL, with which or without scheme; "" if there is none."""
    try:
        has_scheme = re.match("([a-z][a-z0-9+.-]*:)?//", url, re.IGNORECASE)
        return (urlsplit(url if has_scheme else f"//{url}").hostname or "").rstrip(".")
    except ValueError:
        return ""


def _is_of(host: str, domains: list[str]) -> bool:
    return f".{host}".endswith(tuple(f".{domain.lower()}" for domain in domains))
