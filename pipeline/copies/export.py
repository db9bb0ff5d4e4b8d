"""The stage convert's folder in an object store, and back: files by their names, and copy.json put last.

copy.json is there from the beginning, so that nobody else's objects are ever written over; it says `whole` once all
files are.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from drover.pipeline.config.tree import Config
from drover.pipeline.contract.manifest import Manifest
from drover.pipeline.copies.checkpoints import COPY, FORMAT, ExportRecord
from drover.pipeline.copies.claim import put_if
from drover.pipeline.copies.transfer import fetch, send
from drover.pipeline.errors import UserError
from drover.pipeline.files import parsed_json, read_record, typed, write_sealed
from drover.pipeline.stores.store import CHECKED, Changed, Exists, Missing, Store

COPIED = "copied.json"
"""In the stage's folder: where its outputs have been copied to, and which."""
FOLDER = "hf/"


def due(config: Config, folder: Path, manifest: Manifest) -> str:
    """What is still to be done for the finished stage in `folder`, as a phrase; "" if it is copied as is asked for."""
    url = config.convert.copy_to
    if url is None:
        return ""
    with suppress(UserError):
        if read_record(folder / COPIED, dict[str, Any]) == {"url": url, "digest": manifest.digest}:
            return ""
    return f"it is still to be copied to {url}"


def copy_export(url: str, name: str, folder: Path, manifest: Manifest, say: Callable[[str], None]) -> None:
    """Copy the outputs of the stage convert in `folder`, and note that.

    Args:
        name: of the run; another one's export is never written over.

    Raises:
        UserError: what is there is not this run's, or the store does not work.
    """
    store = Store(url)
    files = [{"path": record["path"].removeprefix(FOLDER), "bytes": record["bytes"], "sha256": record["sha256"]}
             for record in manifest.outputs]
    theirs, etag = _read(store)
    others = (entry.path for entry in store.list() if not entry.path.startswith(CHECKED))  # a preflight may leave some
    if theirs is None and (other := next(others, None)) is not None:
        raise UserError(f"{url} holds {other} and perhaps more, but no {COPY}: it is not the place of an export. "
                        f"Nothing is written there; give another convert.copy_to.")
    if theirs is not None and theirs["run"] != name:
        raise UserError(f"{url} holds the export of the run {theirs['run']}, not of {name}. Nothing there is "
                        f"overwritten; give another convert.copy_to, or move away what is there.")
    there = {entry.path: entry.size for entry in store.list()}
    if theirs is None or not theirs["whole"] or theirs["files"] != files or \
            any(there.get(record["path"]) != record["bytes"] for record in files):
        # Only what our own list names is ours to remove, and it is named until it is gone.
        kept = {COPY, *(record["path"] for record in files)}
        gone = [record for record in (theirs["files"] if theirs else []) if record["path"] not in kept]
        etag = _write(store, etag, name, whole=False, files=[*files, *gone])
        size = send(store, folder / FOLDER, "", files)
        store.delete(record["path"] for record in gone)
        _write(store, etag, name, whole=True, files=files)
        say(f"{len(files)} files ({size / 1e6:,.1f} MB) copied to {url}")
    else:
        say(f"the copy in {url} is this export already")
    write_sealed(folder / COPIED, {"url": url, "digest": manifest.digest})


def fetch_copy(url: str, folder: Path) -> int:
    """Fetch an export, or a checkpoint, into a new folder, each file compared with its hash; returns their bytes.

    Raises:
        UserError: there is no whole copy there, or the folder is there already and is not empty.
    """
    store = Store(url)
    content, _ = _read(store)
    if content is None:
        raise UserError(f"{url} holds no copy that Drover made: there is no {COPY}. Give the address of an export "
                        f"(convert.copy_to), or of a checkpoint (train.checkpoint.copy_to/step-...).")
    if not content.get("whole", True):
        raise UserError(f"The copy in {url} is not finished. Wait for the run {content['run']} that makes it, or have "
                        f"it continued.")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder} is there already. Give a folder that is not.")
    folder.parent.mkdir(parents=True, exist_ok=True)
    # Beside it, to be renamed, under a name that nobody else has: `<folder>.tmp` may be the user's.
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as scratch:
        whole = Path(scratch) / folder.name
        whole.mkdir()
        size = fetch(store, "", whole, content["files"])
        whole.replace(folder)
    return size


def _read(store: Store) -> tuple[dict[str, Any] | None, str | None]:
    """copy.json and its ETag; None of both where there is none."""
    entry = store.head(COPY)
    if entry is None:
        return None, None
    try:
        return typed(parsed_json(store.read(COPY)), ExportRecord), entry.etag
    except (Missing, ValueError) as error:
        raise UserError(f"{store.url}/{COPY} is not one that Drover put there ({error}). Give another address, or "
                        f"move away what is there.") from None


def _write(store: Store, etag: str | None, name: str, *, whole: bool, files: Sequence[dict[str, Any]]) -> str:
    text = json.dumps({"format": FORMAT, "run": name, "whole": whole, "files": files}, indent=1) + "\n"
    try:
        return put_if(store, COPY, text.encode(), etag).etag
    except (Exists, Changed):
        raise UserError(f"Another process copies an export to {store.url} at the same time. Wait for it, and run the "
                        f"same command again.") from None
