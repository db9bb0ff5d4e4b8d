"""The shape of the weights in a folder, read from the folder's JSON and YAML files. Without torch; pipeline/formats
reads the weights themselves."""

from __future__ import annotations

from pathlib import Path

from pydantic import ValidationError

from drover.model.config import ModelConfig
from drover.model.huggingface import shape_of
from drover.pipeline.config.yaml_source import read_yaml
from drover.pipeline.core.errors import UserError
from drover.pipeline.core.files import Record, read_json, typed

POSITIONS = ("context_length", "rope_theta", "rope_scaling")
"""The parts of a shape that may be changed by name for existing weights: these extend a context."""


def shape_from(values: Record) -> ModelConfig:
    """The shape in one of our records; ValueError, in one line, if it is none."""
    try:
        return ModelConfig(**values)
    except ValidationError as error:
        raise ValueError("; ".join(f"{'.'.join(map(str, item['loc']))}: {item['msg']}" for item in error.errors())
                         ) from None


def read_shape(path: Path) -> ModelConfig:
    """The shape in a Hugging Face config.json. UserError, naming the key, if our network cannot be it."""
    try:
        return shape_of(typed(read_json(path), Record))
    except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, OSError) as error:
        what = f"it has no {error}" if isinstance(error, KeyError) else " ".join(str(error).split())
        raise UserError(f"{path} does not describe a Llama that Drover can read: {what}") from None


def shape_in(folder: Path) -> ModelConfig:
    """The shape of the weights in a folder: a run, one of its checkpoints, a Hugging Face folder, or weights alone.

    `vocab_size` is None for a run that took it from its tokenizer. UserError if the folder describes no shape.
    """
    places = (folder, *folder.absolute().parents[2:3])
    run = next((place for place in places if (place / "config.yaml").is_file()), None)
    try:
        if (folder / "config.json").is_file():
            return read_shape(folder / "config.json")
        if (folder / "weights.json").is_file():
            return shape_from(typed(read_json(folder / "weights.json"), Record)["model"])
        if run is not None:
            return shape_from(read_yaml(run / "config.yaml").get("model", {}))
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise UserError(f"the shape of the weights in {folder} cannot be read ({error}).") from None
    raise UserError(f"{folder} describes no shape: it is no run, no checkpoint of one, and has no config.json. Weights "
                    f"in Meta's format are not read: download the safetensors of the same model.")
