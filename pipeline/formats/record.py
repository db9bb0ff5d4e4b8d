"""`weights.json`: what Drover says of a folder of weights that it wrote, in whatever form.

    format       of this file
    model        the network's shape, in full: Meta's params.json has no place for the context length, for one
    token_ids    bos_token_id, eos_token_id and pad_token_id, where they are known
    made_of      the command's meaning, and the source's files with size and time
    files        of the folder, each with bytes and sha256

It is no checkpoint's COMPLETE.json: there is no state of an optimizer here, and training cannot resume from it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, TypedDict

from drover.model.config import ModelConfig
from drover.pipeline.config.shapes import shape_from
from drover.pipeline.core.files import Outputs, read_record

RECORD = "weights.json"
FORMAT = 1


class WeightsRecord(TypedDict):
    """What the file holds."""

    format: int
    model: Annotated[dict[str, Any], shape_from]
    token_ids: dict[str, Any]
    made_of: dict[str, Any]
    files: Outputs


def weights_record(folder: Path) -> WeightsRecord | None:
    """The record in a folder, None where there is none; UserError if it is torn or of another version."""
    return read_record(folder / RECORD, WeightsRecord, "Make the folder again.", FORMAT)


def recorded_config(folder: Path) -> ModelConfig | None:
    """The shape that the record in a folder states; None where there is none. Raises as `weights_record`."""
    record = weights_record(folder)
    return ModelConfig(**record["model"]) if record else None
