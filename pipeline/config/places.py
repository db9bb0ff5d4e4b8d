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


def not_a_path(text: str) -> str | None:
    """Why a URL (s3://..., https://...) is no local path; None for a path."""
    if not _ADDRESS.match(text):
        return None
    return (f"{text} is an address, but a path on this machine is needed, mounted file systems included. Mount it, or "
            f"copy it here first, and give the path without file://. Data sets of the Hugging Face Hub are sources of "
            f"the kind hf")


def unreadable(text: str) -> str | None:
    """Why text is no source: neither a path nor a URL in an object store; None for a source."""
    if not is_url(text):
        return not_a_path(text)
    if text.partition("://")[0] not in SCHEMES and not _LOGIN.match(text):
        return f"{not_a_path(text)}. Sources are also read from {', '.join(f'{name}://' for name in SCHEMES)}"
    return unusable_url(text)


def unusable_url(url: str) -> str | None:
    """Why a URL cannot be used, without its secrets. Nothing is contacted."""
    if _LOGIN.match(url):
        return ("a URL has a name or password before @, which would be written to files. Give the URL without it, "
                "and the credentials in the environment")
    try:
        Store(url)
    except UserError as error:
        return str(error)
    return None


def blocked(folder: Path, *, write: bool = False) -> str | None:
    """Why `folder` cannot exist, such as a file in its place, as a sentence; None if it can.

    write: also why nothing could be written into it, or into the folder where it would be made. Makes nothing.
    """
    made, folder = f"runs_dir and name make the folder {folder}", folder.absolute()
    nearest = next(place for place in (folder, *folder.parents) if os.path.lexists(place))
    if not nearest.is_dir():
        return f"{made}, but {nearest} is not a folder: set another runs_dir, or move it away."
    if write and not os.access(nearest, os.W_OK | os.X_OK):
        return (f"{made}, but you may not write into {nearest}: set runs_dir to a folder of yours, or have its "
                f"permissions changed.")
    return None


def make_folder(folder: Path) -> None:
    """Make a run's folder if it is missing; UserError if it cannot be made or written."""
    problem = blocked(folder, write=True)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        if is_full_disk(error):
            raise
        problem = problem or f"runs_dir and name make the folder {folder}, which cannot be made: {error.strerror}."
    if problem is not None:
        raise UserError(problem)
