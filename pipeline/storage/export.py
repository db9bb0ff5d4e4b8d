"""The export of the stage convert in an object store: upload and download."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from drover.pipeline.core.errors import UserError
from drover.pipeline.core.files import publish
from drover.pipeline.storage.mirror import COPY, Mirror, Owner, copy_files, ledger_of
from drover.pipeline.storage.store import Missing, Store

FOLDER = "hf/"


def due(config: Any, folder: Path, manifest: Any) -> str:
    """What the finished stage in `folder` still has to do, as a phrase; "" if the upload is done or not configured."""
    url = config.convert.copy_to
    done = url is None or ledger_of(folder, url).recorded({"": manifest.digest})
    return "" if done else f"the upload to {url} is pending"


def copy_export(url: str, name: str, folder: Path, manifest: Any, say: Callable[[str], None]) -> None:
    """Upload the outputs of the stage convert in `folder`; UserError like `copy_files`. name: of the run."""
    files = [{**record, "path": record["path"].removeprefix(FOLDER)} for record in manifest.outputs]
    say(f"{copy_files(url, name, manifest.digest, folder / FOLDER, files, ledger=ledger_of(folder, url))} in {url}")


def fetch_copy(url: str, folder: Path) -> int:
    """Download an export or a checkpoint into a new folder and compare each file with its hash; returns the bytes.

    Raises:
        UserError: there is no complete copy, or the folder exists and is not empty.
    """
    mirror = Mirror(Store(url))
    try:
        files = mirror.read()["files"]
    except Missing:
        if owner := Owner(mirror.store).content:
            raise UserError(f"The copy in {url} is not finished. Wait for the run {owner['name']} that makes it, or "
                            f"have it continued.") from None
        raise UserError(f"{url} holds no copy that Drover made: there is no {COPY}. Give the address of an export "
                        f"(convert.copy_to), or of a checkpoint (train.checkpoint.copy_to/step-...).") from None
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder} exists already. Give a new folder.")
    folder.parent.mkdir(parents=True, exist_ok=True)
    # Download next to it under a unique name and rename: `<folder>.tmp` may be the user's.
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as scratch:
        staging = Path(scratch) / folder.name
        staging.mkdir()
        size = mirror.fetch(staging, files)
        publish(staging, folder)
    return size
