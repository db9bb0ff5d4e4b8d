"""Checks of paths: URLs where a path is needed, and folders that cannot be written."""

from __future__ import annotations

import os
import re
from pathlib import Path

from drover.pipeline.core.errors import UserError, is_full_disk
from drover.pipeline.storage.store import SCHEMES, Store, is_url

OUTSIDE = frozenset({"paths", "path", "task_folders", "init_from"})
"""Names of settings with paths of files outside of the run. The content decides what is computed, not the path."""
RECORDS = ("config.yaml", "launch", "logs", ".locks")
"""A run's configuration, and folders that every command writes to."""
_ADDRESS = re.compile(r"^([A-Za-z][A-Za-z0-9+.-]*):/{1,2}(?=[^/])|^(file)://")
_LOGIN = re.compile(r"(?!abfs)[^:]+://[^/]*@")
"""A URL with a name or password in it; abfs://container@account has none."""
_HUB = re.compile(r"^hf:/{1,2}(?:datasets/)?([^/@]+/[^/@]+)")


def not_a_path(text: str, *, written: bool = False) -> str | None:
    """The message for a URL (s3://..., https://...) where a local path is needed; None for a path.

    written: the path is to be written, not read.
    """
    found = _ADDRESS.match(text)
    if found is None:
        return None
    scheme = (found[1] or found[2]).lower()
    if scheme == "file":
        return f"{text} is an address; write the path alone, without file://."
    means = (f"{text} is an address ({scheme}://), but files are read and written by path on this machine, mounted "
             f"file systems included.")
    if written:
        return f"{means} Give a path here, or mount it; finished runs can be copied there."
    if scheme == "hf":
        hub = _HUB.match(text)
        name = hub[1] if hub else "<owner>/<name>"
        return (f"{text} is an address on the Hugging Face Hub; read data sets from there with {{kind: hf, name: ..., "
                f"dataset: {name}}}; all else is read and written as files of this machine.")
    how = {"s3": "aws s3 sync", "gs": "gcloud storage cp -r", "gcs": "gcloud storage cp -r", "http": "curl -LO",
           "https": "curl -LO", "az": "azcopy copy", "abfs": "azcopy copy", "abfss": "azcopy copy", "r2": "rclone copy",
           "hdfs": "hdfs dfs -get", "ftp": "curl -LO"}.get(scheme, "rclone copy")
    return f"{means} Copy it here first ({how} ...) or mount it, and give the path."


def unreadable(text: str) -> str | None:
    """The message for text that is no source: neither a path nor a URL in an object store; None for a source."""
    if not is_url(text):
        return not_a_path(text)
    if text.partition("://")[0] not in SCHEMES and not _LOGIN.match(text):
        return f"{not_a_path(text)} Sources are also read from {', '.join(f'{name}://' for name in SCHEMES)}."
    return unusable_url(text)


def unusable_url(url: str) -> str | None:
    """Why a URL cannot be used, as a sentence without its secrets. Nothing is contacted."""
    if _LOGIN.match(url):
        return ("a URL has a name or password before @, which would be written to files. Give the URL without it, "
                "and the credentials in the environment.")
    try:
        Store(url)
    except UserError as error:
        return str(error)
    return None


def blocked(folder: Path, *, write: bool = False) -> str | None:
    """Why `folder` cannot exist, such as a file in its place, as a sentence; None if it can.

    write: also why nothing could be written into it, or into the folder where it would be made. Makes nothing.
    """
    made, here = f"runs_dir and name make the folder {folder}", folder.absolute()
    try:
        while not _is_there(here):
            here = here.parent
        if not here.is_dir():
            what = "a file" if here.exists() else "a broken link"
            return f"{made}, but {here} is {what}, not a folder: set another runs_dir, or move it away."
        for name in RECORDS if here == folder.absolute() else ():
            if _is_there(here / name) and (here / name).is_dir() != (name != "config.yaml"):
                return (f"{here / name} is {'a' if (here / name).is_dir() else 'no'} folder, but a run's records are "
                        f"written there: move it away, or set another name.")
    except OSError as error:  # a name that is too long, a link to itself
        return f"{made}, which cannot be: {error.strerror}. Set another runs_dir."
    if write and not os.access(here, os.W_OK | os.X_OK):
        return (f"{made}, but you may not write into {here}: set runs_dir to a folder of yours, or have its "
                f"permissions changed.")
    return None


def _is_there(path: Path) -> bool:
    """Whether anything is at a path, also a broken link."""
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def make_folder(folder: Path) -> None:
    """Make a run's folder if it is missing; UserError if it cannot be made or written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        if is_full_disk(error):
            raise
        raise UserError(blocked(folder, write=True) or f"runs_dir and name make the folder {folder}, which cannot be "
                        f"made: {error.strerror}. Set another runs_dir.") from None
    if (found := blocked(folder, write=True)) is not None:
        raise UserError(found)
