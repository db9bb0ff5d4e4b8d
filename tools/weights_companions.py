"""The files that belong to weights: tokenizer, chat template, special ids, generation settings."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from drover.pipeline.contract.run import run_in
from drover.pipeline.core.errors import UserError
from drover.pipeline.core.files import Record, read_json
from drover.pipeline.formats.huggingface import OutputFile, text_file
from drover.pipeline.formats.interface import Weights
from drover.pipeline.records.weight_files import IDS, read_settings, settings_file
from drover.pipeline.tokenization.files import (
    CODE,
    MODEL_FILE,
    SETTINGS,
    kind_of_model,
    names_code,
    settings_text,
    vocabulary_record,
)
from drover.pipeline.tokenization.tokenizer import Tokenizer, load_tokenizer

NAMES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json",
         "merges.txt", "chat_template.jinja", "chat_template.json", "generation_config.json")
"""Files of a Hugging Face folder that are copied with its weights."""
TEMPLATES = "additional_chat_templates"
TOKENIZER = ("tokenizer.json", "tokenizer_config.json")
"""The files of a tokenizer in a Hugging Face folder."""
_KEPT_BY_THE_HUB = f"original/{MODEL_FILE}"
"""Llama 3's tokenizer.model in the Hub's folders. llama.cpp would take one next to the weights for
sentencepiece's of type BPE. A run's unigram model is kept there for the same reason."""


@dataclass
class Companions:
    """The files that belong to weights.

    Attributes:
        files: by their name in a Hugging Face folder.
        vocabulary: a tokenizer.model.
        token_ids: as config.json names them.
        context_length: of a run's model, which its tokenizer files do not have; None for other weights.
        trained_with: the tokenizer of a run, if it is a sentencepiece model.
    """

    files: dict[str, Path] = field(default_factory=dict)
    vocabulary: Path | None = None
    token_ids: Record = field(default_factory=dict)
    context_length: int | None = None
    trained_with: Tokenizer | None = None


def companions_of(weights: Weights) -> Companions:
    """The files that belong to weights: from their folder, or from the tokenizer stage of their run."""
    folder = weights.path
    if weights.form == "drover":
        return _of_run(folder, weights.config.context_length)
    settings = read_json(folder / "config.json")
    result = _in_folder(folder)
    result.token_ids = {name: settings[name] for name in IDS if settings.get(name) is not None}
    return result


def _in_folder(folder: Path) -> Companions:
    names = [*NAMES, *(f"{TEMPLATES}/{path.name}" for path in sorted((folder / TEMPLATES).glob("*.jinja")))]
    vocabularies = [path for path in (folder / MODEL_FILE, folder / _KEPT_BY_THE_HUB) if path.is_file()]
    return Companions({name: folder / name for name in names if (folder / name).is_file()},
                      vocabularies[0] if vocabularies else None)


def _of_run(checkpoint: Path, context_length: int) -> Companions:
    """The tokenizer of a training checkpoint's run, and the generation settings of its initial weights."""
    run = checkpoint.resolve().parents[2]  # <run>/train/checkpoints/step-...
    if not (run / "config.yaml").is_file():
        return Companions()
    folder = run_in(run).stage_folder("tokenizer")
    result = _in_folder(folder / "hf")
    result.vocabulary = folder / MODEL_FILE if (folder / MODEL_FILE).is_file() else None
    result.context_length = context_length
    try:
        record = vocabulary_record(folder)
    except UserError:
        record = None  # the tokenizer is gone: `carried_files` prints that there is none
    if record is not None:
        result.token_ids = {"bos_token_id": record["bos_id"], "eos_token_id": record["eos_id"]}
        result.trained_with = load_tokenizer(folder) if record["kind"] == "sentencepiece" else None
    if (kept := settings_file(checkpoint)).is_file():
        result.files[kept.name] = kept
        result.token_ids = {name: value for name, value in read_settings(kept).items() if name in IDS}
    return result


def carried_files(companions: Companions, form: str) -> tuple[list[OutputFile], list[str]]:
    """The files to copy with weights into a format, and sentences about what is copied and what is not."""
    files: dict[str, Callable[[Path], object]] = {
        name: partial(shutil.copyfile, path) for name, path in companions.files.items()}
    sentences = list[str]()
    if settings := companions.files.get(SETTINGS):
        files[SETTINGS] = text_file(SETTINGS, settings_text(settings, companions.context_length)).write
        if names_code(settings):
            sentences.append(f"{SETTINGS} named code ({CODE}), which is left out.")
    if companions.vocabulary is not None:
        scored = (companions.trained_with.model == "BPE" if companions.trained_with
                  else kind_of_model(companions.vocabulary) == "sentencepiece")
        as_hub_has_it = form == "hf" and not scored
        files[_KEPT_BY_THE_HUB if as_hub_has_it else MODEL_FILE] = partial(shutil.copyfile, companions.vocabulary)
    if form == "hf" and companions.vocabulary and TOKENIZER[0] not in companions.files:
        sentences.append(f"There is no {TOKENIZER[0]}; transformers makes one of {MODEL_FILE} "
                         f"(AutoTokenizer.save_pretrained).")
    sentences.insert(0, f"Carried over: {', '.join(files)}." if files else "No tokenizer was carried over.")
    return [OutputFile(name, 0, write) for name, write in files.items()], sentences
