"""Datasets of the Hugging Face Hub, or in a folder of data files, through the `datasets` library."""

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
        UserError: it cannot be loaded or read on, or has no column with text.
    """
    import datasets
    datasets.disable_progress_bars()
    call = f"load_dataset({source.dataset!r}, {source.config_name!r}, split={source.split!r})"
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
        what = f"reading broke off after {number} records of {call}" if rows is not None else f"{call} failed"
        text = " ".join(str(error).split())
        raise UserError(
            f"source {source.name}: {what}: {type(error).__name__}: {text[:500]}. Check the dataset's name, "
            f"`config_name` and `split`, and the network (or HF_HUB_OFFLINE with a filled cache), and run the stage "
            f"again; damaged local files are better read with `kind: files`, which names the broken records and keeps "
            f"the others.") from error
