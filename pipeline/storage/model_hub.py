"""Models and tokenizers of the Hugging Face Hub, by name (`owner/name` or `owner/name@revision`), in the Hub's own
cache; and data sets, in a folder.

A run names a commit from its start on (`pinned`). Only what a user starts downloads; stages read the cache, since nodes
of a cluster may have no network.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from drover.pipeline.core.errors import UserError

NAME = re.compile(r"[A-Za-z0-9][\w.-]{,95}/[A-Za-z0-9][\w.-]{,95}(@[\w./-]{1,255})?", re.ASCII)
COMMIT = re.compile(r".*@[0-9a-f]{40}")
TEXTS = ("*.json", "*.jinja", "*.model", "merges.txt")
"""Configuration, tokenizer and chat templates; `original/tokenizer.model` too."""
CARDS = ("README.md", "dataset_infos.json")
"""Files of a data set that say which data files there are."""
WEIGHTS = "model*.safetensors"
"""Pickled weights are never downloaded, nor the same weights under other names."""


def names_the_hub(text: str) -> bool:
    """Whether a path can only mean the Hub: it has the form of a name there, and neither it exists here nor, without a
    revision, the folder before its slash."""
    return (NAME.fullmatch(text) is not None and not Path(text).exists()
            and ("@" in text or not Path(text).parent.is_dir()))


def pinned(name: str, *recorded: object) -> str:
    """A name on the Hub with its commit, `owner/name@commit`.

    Without a revision it is that of a recorded name, else that which the cache has of the default branch. Otherwise the
    Hub is contacted. UserError as in `hub_folder`.
    """
    if COMMIT.fullmatch(name):
        return name
    known = next((one for one in recorded if isinstance(one, str) and one.startswith(f"{name}@")), None)
    return known or f"{name.partition('@')[0]}@{hub_folder(name, download=True).name}"


def hub_folder(text: str, *, weights: bool = False, download: bool = False) -> Path:
    """The folder in the cache with the files of a name on the Hub; it is called like the commit.

    Args:
        weights: also the weights, not only configuration and tokenizer.
        download: what the cache does not have. Of a commit whose files are all there the Hub is not contacted.

    Raises:
        UserError: they are not in the cache and cannot be downloaded, with what to do.
    """
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

    name, _, revision = text.partition("@")
    patterns = [*TEXTS, *[WEIGHTS] * weights]
    with suppress(OSError, ValueError):  # a cached branch or tag keeps its commit
        revision = Path(snapshot_download(name, revision=revision or None, allow_patterns=[],
                                          local_files_only=True)).name
    command = " ".join(["hf download", name, *[f"--revision {revision}"] * bool(revision),
                        *(f"--include '{pattern}'" for pattern in patterns)])
    try:
        folder = Path(snapshot_download(name, revision=revision or None, allow_patterns=patterns,
                                        local_files_only=not download))
    except (GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError) as error:
        why = _refusal(error, name)
    except Exception as error:  # noqa: BLE001 - the library and its HTTP client raise many kinds
        failed = f", and the download failed ({_reason(error)})" * download
        why = (f"its files are not all in the cache {constants.HF_HUB_CACHE}{failed}. Where there is a network, this "
               f"fetches them into the cache: {command}")
    else:
        if not weights or any(folder.glob(WEIGHTS)):
            return folder
        why = (f"{folder} has no {WEIGHTS}, and other weights are not downloaded. If the Hub has them, this fetches "
               f"them: {command}. Otherwise download what it has yourself, and give the folder")
    raise UserError(f"{text} is no folder here, so it is {name} on the Hugging Face Hub, but {why}.")


def download_dataset(name: str, revision: str | None, home: Path, wanted: Callable[[Path], list[str]]) -> Path:
    """The folder `home/COMMIT` with files of a data set at one commit. A killed download continues with its commit.

    Args:
        revision: a branch, tag or commit; None: the default branch.
        wanted: from the folder with the data set's card, if it has one, to patterns of the files to download. Python
            code is never downloaded.

    Raises:
        UserError: the Hub refuses, or cannot be reached.
    """
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

    try:
        partial = sorted(folder.name for folder in home.glob("*") if COMMIT.fullmatch(f"@{folder.name}"))
        commit = partial[0] if partial else str(HfApi().dataset_info(name, revision=revision).sha)
        for patterns in (lambda _: [*CARDS], wanted):
            snapshot_download(name, repo_type="dataset", revision=commit, local_dir=home / commit,
                              allow_patterns=patterns(home / commit), ignore_patterns=["*.py"])
    except (GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError) as error:
        raise UserError(f"The data set {name}: {_refusal(error, f'datasets/{name}')}.") from None
    except Exception as error:
        raise UserError(f"The data set {name} cannot be downloaded ({_reason(error)}). Give the same command again "
                        f"where there is a network: it continues with what was downloaded.") from error
    return home / commit


def _refusal(error: Exception, page: str) -> str:
    return (f"the Hub refuses it ({type(error).__name__}): correct the name and what follows the @; or log in (hf "
            f"auth login, or HF_TOKEN), where access is granted on request after you have requested it at "
            f"https://huggingface.co/{page}")


def _reason(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
