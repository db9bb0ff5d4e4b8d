"""What may become of an operation on an object: what is known of it, and the errors that a caller may act on."""

from __future__ import annotations

from dataclasses import dataclass

from drover.pipeline.core.errors import UserError


class Missing(UserError):  # noqa: N818 - the names say what is so
    """There is no such object."""


class Exists(UserError):  # noqa: N818
    """It was to be written only if new, and is there already."""


class Changed(UserError):  # noqa: N818
    """It is not what it was: the object that is being read has another ETag."""


@dataclass(frozen=True)
class Entry:
    """An object.

    Attributes:
        path: relative to the store's prefix.
        size: in bytes.
        etag: what the store calls this content; empty where it gives none.
        modified: seconds since 1970.
    """

    path: str
    size: int
    etag: str
    modified: float
