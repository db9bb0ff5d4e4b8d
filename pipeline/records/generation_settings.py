"""A model's generation_config.json: special ids, among them every id that ends a text, and sampling settings. A run
that starts from such a model keeps them next to its checkpoints, for its export. Without torch."""

from __future__ import annotations

from pathlib import Path

from drover.pipeline.core.files import Record, read_record, write_json
from drover.pipeline.records.checkpoints import CHECKPOINTS
from drover.pipeline.records.weight_files import HUGGING_FACE, RUN, weights_folder

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
