"""A tokenizer by its name on the Hugging Face Hub (`owner/name`): downloaded once, then read from the library's
cache."""

from __future__ import annotations

import re
from pathlib import Path

from drover.pipeline.core.errors import UserError

NAME = re.compile(r"[\w][\w.-]*/[\w][\w.-]*")


def names_the_hub(path: str) -> bool:
    """Whether a `tokenizer.path` can only mean the Hub: no such path exists, and it has the form owner/name."""
    return NAME.fullmatch(path) is not None and not Path(path).exists() and not Path(path).parent.is_dir()


def fetched(name: str, files: list[str]) -> Path:
    """The folder with those of `files` that the Hub's repository `name` has.

    A cached version is used as it is: the Hub is contacted only if the cache has none. So nodes without a network find
    what the launcher downloaded, and a run does not change with the Hub.

    Raises:
        UserError: it cannot be downloaded, with what to do.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError
    try:
        return Path(snapshot_download(name, allow_patterns=files, local_files_only=True))
    except LocalEntryNotFoundError:
        pass
    try:
        return Path(snapshot_download(name, allow_patterns=files))
    except Exception as error:  # noqa: BLE001 - the library and its HTTP client raise many kinds
        reason, *_ = str(error).strip().splitlines() or [type(error).__name__]
        raise UserError(f"tokenizer.path: there is no {name} here, and the download from the Hugging Face Hub failed "
                        f"({reason}). Without a network, download it elsewhere (hf download {name} "
                        f"{' '.join(files[:2])} --local-dir FOLDER) and give the folder. If the repository asks for "
                        f"consent, log in first (hf auth login).") from None
