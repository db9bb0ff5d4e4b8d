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
from typing import Any

from model.config import ModelConfig
from pipeline.errors import UserError
from pipeline.files import read_json

RECORD = "weights.json"
FORMAT = 1


def read_record(folder: Path) -> dict[str, Any] | None:
    """The record in a folder, None where there is none; UserError if it is torn or of another version."""
    path = folder / RECORD
    if not path.is_file():
        return None
    try:
        record = read_json(path)
        if record["format"] != FORMAT:
            raise UserError(f"{path} has form {record['format']}; this Drover reads form {FORMAT}. Use the version "
                            f"that wrote it.")
        ModelConfig(**record["model"])
        if not isinstance(record["made_of"], dict) or not isinstance(record["token_ids"], dict):
            raise TypeError("made_of and token_ids are no objects")
        for file in record["files"]:
            file["path"], file["bytes"], file["sha256"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} is torn, or was not written by Drover ({error}). Make the folder again.") from None
    return dict(record)


def recorded_config(folder: Path) -> ModelConfig | None:
    """The shape that the record in a folder states; None where there is none. Raises as `read_record`."""
    record = read_record(folder)
    return ModelConfig(**record["model"]) if record else None
