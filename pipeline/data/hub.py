"""Datasets of the Hugging Face Hub, or in a folder of data files, through the `datasets` library."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from drover.pipeline.config.data import HubSource
from drover.pipeline.core.console import first
from drover.pipeline.core.errors import UnusableInputError, UserError, install
from drover.pipeline.core.folders import files_below

CARDS = {"README.md", "dataset_infos.json", ".huggingface.yaml"}
"""Files of a dataset's folder in which the library looks up which data files there are."""
NO_DATA = re.compile(r"license|config\.json|dataset_info\.json", re.IGNORECASE)
"""How the names of files begin that are in a dataset's folder and hold no text of it."""
SAVED = ("state.json", "dataset_dict.json")
"""Files that `save_to_disk` writes."""


def folder_files(source: HubSource, folder: Path) -> tuple[list[Path], list[str]]:
    """The files of a local dataset that the library reads, and what is wrong with it as sentences: among that, files
    that it would leave out although nobody chose so.

    Chosen is to leave out the other splits where the configuration names one, and the other configurations of the
    dataset where it names one.
    """
    own = f"source {source.name}:"
    paths = files_below(folder)
    if not paths:
        return [], [f"{own} the folder {folder} holds no files. Put data files there, or correct `dataset`."]
    if any((folder / name).is_file() for name in SAVED):
        return [], [f"{own} {folder} was written by save_to_disk, which load_dataset does not read. Use kind: files "
                    f"with paths: [{folder}/**/data-*.arrow]."]
    try:
        import datasets
        builder = datasets.load_dataset_builder(source.dataset, source.config_name)
        splits = _splits(builder, folder)
        names = {part.partition("[")[0].strip() for part in source.split.split("+")}
        wanted = set(splits) if names == {"all"} else names
        if absent := wanted - set(splits):
            return [], [f"{own} {_call(source)} failed: no split {', '.join(sorted(absent))} is there. Set `split` to "
                        f"one of {', '.join(splits)}, or read the folder with `kind: files`."]
        read = set[Path]().union(*(splits[name] for name in wanted))
        unread = {path for path in paths if not NO_DATA.match(path.name)} - read - {folder / name for name in CARDS}
        elsewhere = set[Path]().union(*splits.values()) & unread
        if "split" in source.model_fields_set:
            unread -= elsewhere
        if unread and source.config_name is not None:
            for name in builder.builder_configs:
                unread -= set().union(*_splits(datasets.load_dataset_builder(source.dataset, name), folder).values())
    except ModuleNotFoundError:
        return [], [f"{own} `kind: hf` needs the package datasets: {install('datasets')}."]
    except Exception as error:  # noqa: BLE001 - of the library: whatever it is, this dataset cannot be read
        return [], [f"{own} {_call(source)} failed: {_shortly(error)}. Correct the folder or `config_name`, or read "
                    f"its files with `kind: files`."]
    if read and builder.__module__.endswith(".text"):
        return [], [f"{own} of text files the library makes each line a document. Use `kind: files` with paths: "
                    f"[{folder}/**/*{max(read).suffix}]: each file is a document, or `separator` divides it."]
    if unread:
        named = first(sorted(path.relative_to(folder).as_posix() for path in unread))
        choice = f", or leave the other splits out with `split: {source.split}`" if unread <= elsewhere else ""
        return [], [f"{own} the library does not read {len(unread):,} of the {len(paths):,} files of {folder} "
                    f"({named}): it takes splits from names, one format, and no folders that are links. Read all with "
                    f"`kind: files`{choice}, or move these files elsewhere."]
    return [path for path in paths if path in read or (path.name in CARDS and path.parent == folder)], []


def _splits(builder: Any, folder: Path) -> dict[str, set[Path]]:
    """The files in the folder that a builder reads, of each split."""
    base = folder.resolve()
    return {str(split): {folder / path.relative_to(base) for path in map(Path, files) if path.is_relative_to(base)}
            for split, files in builder.config.data_files.items()}


def _call(source: HubSource) -> str:
    return f"load_dataset({source.dataset!r}, {source.config_name!r}, split={source.split!r})"


def _shortly(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:500]}"


def hub_rows(source: HubSource) -> Iterator[tuple[int, Any]]:
    """The rows of a Hugging Face dataset with their numbers, from 1.

    A damaged row cannot be skipped, so it fails the stage.

    Raises:
        UserError: it cannot be loaded or read on, or has no column with text.
    """
    import datasets
    datasets.disable_progress_bars()
    number, rows = 0, None
    try:
        rows = datasets.load_dataset(source.dataset, source.config_name, split=source.split,
                                     revision=source.revision, streaming=source.streaming)
        for number, row in enumerate(islice(rows, source.limit), 1):
            if number == 1 and source.text_field not in row:
                raise UnusableInputError(f"source {source.name}: the dataset {source.dataset} has no column "
                                         f"'{source.text_field}'. Set text_field to one of {', '.join(row)}.")
            yield number, row
    except UserError:
        raise
    except Exception as error:
        what = f"reading broke off after {number} records of {_call(source)}" if rows is not None else \
            f"{_call(source)} failed"
        raise UserError(
            f"source {source.name}: {what}: {_shortly(error)}. Check the dataset's name, "
            f"`config_name` and `split`, and the network (or HF_HUB_OFFLINE with a filled cache), and run the stage "
            f"again; damaged local files are better read with `kind: files`, which names the broken records and keeps "
            f"the others.") from error
