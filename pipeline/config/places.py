"""Checks of paths: URLs where a path is needed, and folders that cannot be written."""

from __future__ import annotations

import os
import re
from pathlib import Path

from drover.pipeline.core.errors import UserError, is_full_disk
from drover.pipeline.storage.store import SCHEMES, Store, is_url

EXTERNAL = frozenset({"paths", "path", "task_folders", "init_from"})
"""Names of settings with paths of files outside of the run. The content decides what is computed, not the path."""
_ADDRESS = re.compile(r"^([A-Za-z][A-Za-z0-9+.-]*):/{1,2}(?=[^/])|^file://")
_LOGIN = re.compile(r"(?!abfs)[^:]+://[^/]*@")
"""A URL with a name or password in it; abfs://container@account has none."""


def local(text: str) -> str:
    """The text; ValueError if it is a URL (s3://..., https://...) and no path on this machine."""
    if _ADDRESS.match(text):
        raise ValueError(f"{text} is an address, but a path on this machine is needed, mounted file systems included. "
                         f"Mount it, or copy it here first, and give the path without file://. Data sets of the "
                         f"Hugging Face Hub are sources of the kind hf")
    return text


def readable(text: str) -> str:
    """The text; ValueError if it is neither a path nor a URL in an object store."""
    if not is_url(text):
        return local(text)
    if text.partition("://")[0] not in SCHEMES and not _LOGIN.match(text):
        raise ValueError(f"{text} is an address from which Drover does not read. Copy the files here first, and give "
                         f"their path. Data sets of the Hugging Face Hub are sources of the kind hf. Sources are also "
                         f"read from {', '.join(f'{name}://' for name in SCHEMES)}")
    return usable_url(text)


def usable_url(url: str) -> str:
    """The URL; ValueError, without its secrets, if it cannot be used. Nothing is contacted."""
    if _LOGIN.match(url):
        raise ValueError("a URL has a name or password before @, which would be written to files. Give the URL without "
                         "it, and the credentials in the environment")
    try:
        Store(url)
    except UserError as error:
        raise ValueError(str(error)) from None
    return url


def unsigned(url: str) -> str:
    """The URL; ValueError if it is signed."""
    if "?" in url:
        raise ValueError("a URL with a question mark is signed, which does not work. Give the URL of a prefix")
    return url


def blocked(folder: Path, *, write: bool = False) -> str | None:
    """Why `folder` cannot exist, such as a file in its place, as a sentence; None if it can.

    write: also why nothing could be written into it, or into the folder where it would be made. Makes nothing.
    """
    made = f"runs_dir and name make the folder {folder}"
    folder = folder.absolute()
    nearest = next(place for place in (folder, *folder.parents) if os.path.lexists(place))
    if not nearest.is_dir():
        return f"{made}, but {nearest} is not a folder: set another runs_dir, or move it away."
    if write and not os.access(nearest, os.W_OK | os.X_OK):
        return (f"{made}, but you may not write into {nearest}: set runs_dir to a folder of yours, or have its "
                f"permissions changed.")
    return None


def make_folder(folder: Path) -> None:
    """Make a run's folder if it is missing; UserError if it cannot be made or written."""
    if problem := blocked(folder, write=True):
        raise UserError(problem)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        if is_full_disk(error):
            raise
        raise UserError(f"runs_dir and name make the folder {folder}, which cannot be made: {error.strerror}."
                        ) from None
