"""Datasets of the Hugging Face Hub, or in a folder of data files, through the `datasets` library."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import chain, islice
from pathlib import Path
from typing import Any

from drover.pipeline.config.data import HubSource
from drover.pipeline.core.console import first
from drover.pipeline.core.errors import UnusableInputError, UserError, require
from drover.pipeline.core.folders import files_below

CARDS = {"README.md", "dataset_infos.json", ".huggingface.yaml"}
"""Files of a dataset's folder in which the library looks up which data files there are."""
NO_DATA = re.compile(r"license|config\.json|dataset_info\.json", re.IGNORECASE)
"""How the names of files begin that are in a dataset's folder and hold no text of it."""
SAVED = ("state.json", "dataset_dict.json")
"""Files that `save_to_disk` writes."""
OTHER_SPLIT, OTHER_CONFIGURATION, NO_TEXT, NOT_TAKEN = (
    "of another split", "of another configuration", "no text, by its name", "not taken by the library")
"""Why a file of a dataset is left out."""


def _builder(source: HubSource) -> tuple[Any, dict[str, list[str]]]:
    """The library's builder of a dataset, and the data files that it reads for each split.

    Raises:
        UserError: the library does not find them, or makes each line of text files a document.
    """
    require(f"source {source.name}: `kind: hf`", "datasets")
    import datasets
    try:
        builder = datasets.load_dataset_builder(source.dataset, source.config_name, revision=source.revision)
        splits = _splits(builder, Path(source.dataset).absolute())
    except Exception as error:
        raise _failure(source, error) from error
    if builder.__module__.endswith(".text"):
        ending = Path(next(chain.from_iterable(splits.values()))).suffix
        raise UserError(f"source {source.name}: of text files the library makes each line a document. Use `kind: "
                        f"files` with paths: [{source.dataset}/**/*{ending}]: each file is a document, or `separator` "
                        f"divides it.")
    return builder, splits


def _left_out(source: HubSource, folder: Path) -> dict[str, str]:
    """The files of a local dataset that the library leaves out, and why."""
    import datasets
    builder, splits = _builder(source)
    others = set[str]()
    if source.config_name is not None:
        for name in builder.builder_configs:
            others.update(*_splits(datasets.load_dataset_builder(source.dataset, name), folder).values())
    names = {part.strip() for part in source.split.split("+")}
    wanted = set(splits) if names == {"all"} else names
    if splits and (absent := wanted - set(splits)):
        raise UserError(f"source {source.name}: {_call(source)} failed: no split {', '.join(sorted(absent))} is there. "
                        f"Set `split` to one of {', '.join(splits)}, or read the files with `kind: files`.")
    read = {name for split, own in splits.items() if split in wanted for name in own}
    result = {name: OTHER_SPLIT for own in splits.values() for name in own}
    for path in files_below(folder):
        if path.name not in CARDS or path.parent != folder:
            result.setdefault(str(path), OTHER_CONFIGURATION if str(path) in others else
                              NO_TEXT if NO_DATA.match(path.name) else NOT_TAKEN)
    return {name: reason for name, reason in sorted(result.items()) if name not in read}


def folder_files(source: HubSource, folder: Path) -> list[Path]:
    """The files of a local dataset that the library reads.

    Chosen is to leave out the other splits where the configuration names one, and the other configurations of the
    dataset where it names one.

    Raises:
        UserError: it cannot be read, or files would be left out although nobody chose so.
    """
    paths = files_below(folder)
    if not paths:
        raise UserError(f"source {source.name}: the folder {folder} holds no files. Put data files there, or correct "
                        f"`dataset`.")
    if any((folder / name).is_file() for name in SAVED):
        raise UserError(f"source {source.name}: {folder} was written by save_to_disk, which load_dataset does not "
                        f"read. Use kind: files with paths: [{folder}/**/data-*.arrow].")
    left_out = _left_out(source, folder)
    refused = {NOT_TAKEN} if "split" in source.model_fields_set else {NOT_TAKEN, OTHER_SPLIT}
    if unread := [name for name, reason in left_out.items() if reason in refused]:
        named = first([Path(name).relative_to(folder).as_posix() for name in unread])
        choice = "" if any(left_out[name] == NOT_TAKEN for name in unread) else \
            f", or leave the other splits out with `split: {source.split}`"
        raise UserError(f"source {source.name}: the library does not read {len(unread):,} of the {len(paths):,} files "
                        f"of {folder} ({named}): it takes splits from names, one format, and no folders that are "
                        f"links. Read all with `kind: files`{choice}, or move these files elsewhere.")
    return [path for path in paths if str(path) not in left_out]


def _splits(builder: Any, folder: Path) -> dict[str, list[str]]:
    """The files that a builder reads for each split; those in the folder by its own path."""
    base = folder.resolve()
    return {str(split): [str(folder / Path(name).relative_to(base)) if Path(name).is_relative_to(base) else name
                         for name in files] for split, files in (builder.config.data_files or {}).items()}


def _call(source: HubSource) -> str:
    return f"load_dataset({source.dataset!r}, {source.config_name!r}, split={source.split!r})"


def _failure(source: HubSource, error: Exception, done: int = 0) -> UserError:
    """What a user reads about an error of the library, whatever it is, after so many records."""
    reason = f"{type(error).__name__}: {' '.join(str(error).split())[:500]}"
    return UserError(f"source {source.name}: {_call(source)} failed{f' after {done:,} records' if done else ''}: "
                     f"{reason}. Check the dataset's name, `config_name` and `split`, and the network (or "
                     f"HF_HUB_OFFLINE with a filled cache), and run the stage again; local files are better read with "
                     f"`kind: files`, which names broken records and keeps the others.")


def hub_rows(source: HubSource) -> Iterator[tuple[int, Any]]:
    """The rows of a Hugging Face dataset with their numbers, from 1.

    A damaged row cannot be skipped, so it fails the stage.

    Raises:
        UserError: it cannot be loaded or read on, or has no column with text.
    """
    import datasets
    datasets.disable_progress_bars()
    _builder(source)
    number = 0
    try:
        rows = datasets.load_dataset(source.dataset, source.config_name, split=source.split,
                                     revision=source.revision, streaming=True)
        for number, row in enumerate(islice(rows, source.limit), 1):
            if number == 1 and source.text_field not in row:
                raise UnusableInputError(f"source {source.name}: the dataset {source.dataset} has no column "
                                         f"'{source.text_field}'. Set text_field to one of {', '.join(row)}.")
            yield number, row
    except UserError:
        raise
    except Exception as error:
        raise _failure(source, error, number) from error
