"""The files that hold the weights in a folder, by its form: the inputs of a run that starts from them; and the settings
of a model's generation_config.json, which such a run keeps for its export. Without torch; pipeline/formats/weights.py
reads the weights."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from drover.pipeline.config.kinds import external_sources
from drover.pipeline.config.loading import read_without_plugins
from drover.pipeline.config.optimizers import optimizer_kind
from drover.pipeline.config.tree import Config
from drover.pipeline.core.errors import UserError
from drover.pipeline.core.files import Record, read_record, write_json
from drover.pipeline.records.checkpoints import CHECKPOINTS, MARKER, complete_checkpoints
from drover.pipeline.storage.model_hub import hub_folder, names_the_hub

OURS = "drover."
RUN = "config.yaml"
"""In the folder of a run."""
HUGGING_FACE = "config.json"
DCP = ".metadata"
"""In a folder of torch.distributed.checkpoint."""


def weights_folder(path: Path, *, download: bool = False) -> Path:
    """The folder itself, a run's newest complete checkpoint, or the cache's folder of a name on the Hub. UserError if
    there is none.

    download: from the Hub what its cache does not have.
    """
    if names_the_hub(str(path)):
        return hub_folder(str(path), weights=True, download=download)
    if not path.is_dir():
        raise UserError(f"{path} is no folder. Weights are read from a run, a training checkpoint, a folder in Hugging "
                        f"Face's form (config.json), or the Hub by name (owner/name).")
    if not (path / RUN).is_file():
        return path
    result = complete_checkpoints(path / "train")
    if not result:
        train = read_without_plugins(path / RUN).train
        every = train.checkpoint.every_steps or train.steps
        raise UserError(f"The run {path} has no complete checkpoint yet. Training saves one every {every} steps "
                        f"(train.checkpoint.every_steps) and when it ends, also by `drover stop {path}`; `drover "
                        f"status {path}` shows its steps.")
    return result[-1]


def weight_files(path: Path) -> list[Path]:
    """The files that decide the weights. For a checkpoint this is the marker, which has the hashes of all others."""
    folder = weights_folder(path)
    if (folder / MARKER).is_file():
        return [folder / MARKER]
    patterns = (HUGGING_FACE, DCP, "*.distcp", "*.safetensors", "*.safetensors.index.json")
    result = sorted(file for pattern in patterns for file in folder.glob(pattern))
    if not result:
        raise UserError(f"{folder} holds no weights: neither {MARKER} nor {HUGGING_FACE}. Meta's format is not read: "
                        f"download the safetensors of the same model.")
    return result


def training_code(config: Config) -> dict[str, Path]:
    """The source files of attention, optimizer and hooks that are not built in, by module, as far as they are found.
    Only the table that names an optimizer is imported for that."""
    named = [config.train.attention, config.train.optimizer, *(hook.kind for hook in config.train.hooks)]
    if ":" in config.train.optimizer:
        with suppress(UserError):
            named.append(optimizer_kind(config.train.optimizer).make)
    return external_sources(name for name in named if not name.startswith(OURS))


def input_files(config: Config) -> list[tuple[str, Path]]:
    """The files of `train.init_from`, for the contract: equal weights may be in another folder."""
    if config.train.init_from is None:
        return []
    try:
        result = weight_files(Path(config.train.init_from))
    except UserError as error:
        raise UserError(f"train.init_from: {error}") from None
    return [(f"init_from/{path.name}", path) for path in result]


FILE = "generation_config.json"
FIX = "Fetch or export the folder again."
IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
_OF_THE_WRITER = ("_from_model_config", "transformers_version")
"""Keys that describe who wrote a file and from what; they do not hold for another file."""


def settings_file(weights: Path) -> Path:
    """The settings file of the weights in a folder, if there is one: next to them, or in the train folder of the run
    whose checkpoint they are."""
    folder = weights.resolve()
    inside = folder.parent.name == CHECKPOINTS and len(folder.parents) > 2 and (folder.parents[2] / RUN).is_file()
    return (folder.parents[1] if inside else weights) / FILE


def read_settings(file: Path) -> Record:
    """The content of a generation_config.json, {} if there is none; UserError if it is no JSON object."""
    return read_record(file, Record, FIX) or {}


def stated_settings(folder: Path) -> Record:
    """The settings of the weights in a folder, with the special ids that only its config.json has. UserError for a file
    that is no JSON object."""
    ids = read_record(folder / HUGGING_FACE, Record, FIX) or {}
    return {name: ids[name] for name in IDS if ids.get(name) is not None} | read_settings(settings_file(folder))


def keep_settings(path: Path | None, train_folder: Path, bos_id: int, eos_id: int) -> None:
    """Copy the settings of the initial weights into the train folder; without initial weights, remove old ones.

    Args:
        path: `train.init_from`. Raises UserError like `read_settings`.
        bos_id, eos_id: ids that training puts around documents. EOS is added to the ids that end a text.
    """
    if path is None:
        (train_folder / FILE).unlink(missing_ok=True)
        return
    settings = stated_settings(weights_folder(path))
    stated = settings.get("eos_token_id")
    ends = stated if isinstance(stated, list) else [] if stated is None else [stated]
    if eos_id not in ends:
        stated = [*ends, eos_id] if ends else eos_id
    kept = {name: value for name, value in settings.items() if name not in _OF_THE_WRITER}
    write_json(train_folder / FILE, {**kept, "bos_token_id": bos_id, "eos_token_id": stated})
