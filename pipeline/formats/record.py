"""`weights.json`: Drover's description of a folder of weights that it wrote, in any format.

    format       of this file
    model        the network's complete shape
    token_ids    bos_token_id, eos_token_id and pad_token_id, if they are known
    made_of      the options of the command, and the source's files with size and modification time
    files        of the folder, each with bytes and sha256

A folder with it is not a checkpoint: there is no optimizer state, and training cannot resume from it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, TypedDict

from drover.pipeline.config.loading import shape_from
from drover.pipeline.core.files import Outputs, Record, read_record

RECORD = "weights.json"
FORMAT = 1


class WeightsRecord(TypedDict):
    """The content of the file."""

    format: int
    model: Annotated[Record, shape_from]
    token_ids: Record
    made_of: Record
    files: Outputs


def weights_record(folder: Path) -> WeightsRecord | None:
    """The record in a folder; None if there is none. UserError if it is truncated or of another version."""
    return read_record(folder / RECORD, WeightsRecord, "Make the folder again.", FORMAT)
