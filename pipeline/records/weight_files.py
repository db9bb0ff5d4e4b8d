"""The files that hold the weights in a folder, by its form: the inputs of a run that starts from them. Without torch;
pipeline/formats/weights.py reads them."""

from __future__ import annotations

from pathlib import Path

from drover.pipeline.config.tree import Config
from drover.pipeline.core.errors import UserError
from drover.pipeline.records.checkpoints import MARKER, complete_checkpoints

RUN = "config.yaml"
"""In the folder of a run."""
HUGGING_FACE = "config.json"
INDEX = "index.json"
"""Next to weights alone, without optimizer state."""


def weights_folder(path: Path) -> Path:
    """The folder itself, or a run's newest complete checkpoint. UserError if there is none."""
    if not path.is_dir():
        raise UserError(f"{path} is no folder. Weights are read from a run, a training checkpoint, or a folder in "
                        f"Hugging Face's form (config.json).")
    if not (path / RUN).is_file():
        return path
    result = complete_checkpoints(path / "train")
    if not result:
        raise UserError(f"The run {path} has no complete checkpoint yet.")
    return result[-1]


def weight_files(path: Path) -> list[Path]:
    """The files that decide the weights. For a checkpoint this is the marker, which has the hashes of all others."""
    folder = weights_folder(path)
    if (folder / MARKER).is_file():
        return [folder / MARKER]
    if (folder / INDEX).is_file():
        return [folder / INDEX, *sorted(folder.glob("*.safetensors"))]
    patterns = (HUGGING_FACE, "*.safetensors", "*.safetensors.index.json", "pytorch_model*.bin*")
    result = sorted(file for pattern in patterns for file in folder.glob(pattern))
    if not result:
        raise UserError(f"{folder} holds no weights: neither {MARKER} nor {HUGGING_FACE}. Meta's format is not read: "
                        f"download the safetensors of the same model.")
    return result


def input_files(config: Config) -> list[tuple[str, Path]]:
    """The files of `train.init_from`, for the contract: equal weights may be in another folder."""
    if config.train.init_from is None:
        return []
    try:
        result = weight_files(Path(config.train.init_from))
    except UserError as error:
        raise UserError(f"train.init_from: {error}") from None
    return [(f"init_from/{path.name}", path) for path in result]
