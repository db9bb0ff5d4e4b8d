"""Results of operations on objects: entries, and errors that callers can handle."""

from __future__ import annotations

from dataclasses import dataclass

from drover.pipeline.core.errors import UserError


class Missing(UserError):  # noqa: N818 - the names say what is so
    """There is no such object."""


class Exists(UserError):  # noqa: N818
    """It was to be written only if new, but exists."""


class Changed(UserError):  # noqa: N818
    """The object has changed: its ETag is another."""


@dataclass(frozen=True)
class StoredObject:
    """An object.

    Attributes:
        path: relative to the store's prefix.
        size: in bytes.
        etag: the store's identifier of this content; empty if it gives none.
        modified: seconds since 1970.
    """

    path: str
    size: int
    etag: str
    modified: float
