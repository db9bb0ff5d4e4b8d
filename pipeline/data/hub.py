"""Datasets of the Hugging Face Hub, through the `datasets` library."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

from drover.pipeline.config.data import HubSource
from drover.pipeline.core.errors import UnusableInputError, UserError


def hub_rows(source: HubSource) -> Iterator[tuple[int, Any]]:
    """The rows of a Hugging Face dataset with their numbers, from 1.

    A damaged row cannot be skipped, so it fails the stage.

    Raises:
        UserError: it cannot be loaded or read on, has no column with text, or is of text files, of which the library
            makes each line a document.
    """
    import datasets
    datasets.disable_progress_bars()
    number = 0
    try:
        builder = datasets.load_dataset_builder(source.dataset, source.config_name, revision=source.revision)
        if builder.__module__.endswith(".text"):
            raise UserError(f"source {source.name}: of text files the library makes each line a document. Download "
                            f"them, and read them with `kind: files`: each file is a document, or `separator` divides "
                            f"it.")
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
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:500]}"
        raise UserError(f"source {source.name}: load_dataset({source.dataset!r}, {source.config_name!r}, "
                        f"split={source.split!r}) failed after {number:,} records: {reason}. Check the dataset's name, "
                        f"`config_name` and `split`, and the network (or HF_HUB_OFFLINE with a filled cache), and run "
                        f"the stage again; or download its files and read them by `kind: files`, which names broken "
                        f"records and keeps the others.") from error
