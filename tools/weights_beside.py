"""What lies beside weights and is to go with them: tokenizer, chat template, special ids, settings of generation."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from drover.pipeline.contract.run import run_in
from drover.pipeline.core.errors import UserError
from drover.pipeline.core.files import read_json
from drover.pipeline.formats.base import Weights
from drover.pipeline.formats.record import weights_record
from drover.pipeline.records.generation_settings import IDS, read_settings, settings_file
from drover.pipeline.tokenization.base import Tokenizer
from drover.pipeline.tokenization.kinds import open_tokenizer, vocabulary_record

NAMES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json",
         "merges.txt", "chat_template.jinja", "chat_template.json", "generation_config.json")
"""Files of a Hugging Face folder that go with its weights."""
TEMPLATES = "additional_chat_templates"
MODEL_FILE = "tokenizer.model"
_KEPT_BY_THE_HUB = f"original/{MODEL_FILE}"
"""Where the Hub's folders have Llama 3's: readers of such folders take one beside the weights for sentencepiece's."""
_PROBE = "  Two  spaces,\ttabs\n\nlines; ﬁve ½ Ａ e\u0301 don't 1234567 \U0001f44b "
"""What normalisers of text change."""


@dataclass
class Beside:
    """files: by their name in a Hugging Face folder. vocabulary: a tokenizer.model, as Meta has it. tokenizer: what
    that defines, where there is nothing else that transformers would read. token_ids: as config.json names them.
    context_length: of a run, which its tokenizer does not know; None elsewhere."""

    files: dict[str, Path] = field(default_factory=dict)
    vocabulary: Path | None = None
    tokenizer: Tokenizer | None = None
    token_ids: dict[str, Any] = field(default_factory=dict)
    context_length: int | None = None


def beside(weights: Weights) -> Beside:
    """What lies beside these weights: in their folder, or in the tokenizer stage of the run that they are of."""
    folder = weights.path
    if weights.form == "hf":
        settings = read_json(folder / "config.json")
        ids = {name: settings[name] for name in IDS if settings.get(name) is not None}
    elif (record := weights_record(folder)) is not None:
        ids = record["token_ids"]
    elif weights.form == "drover":
        return _of_run(folder, weights.config.context_length)
    else:
        ids = {}
    found = _in_folder(folder)
    if found.vocabulary and not {"tokenizer.json", "tokenizer_config.json"} & found.files.keys():
        found.tokenizer = _tokenizer(found.vocabulary, weights.config.vocab_size or 0)
    if found.tokenizer and not ids:
        ids = {"bos_token_id": found.tokenizer.bos_id, "eos_token_id": found.tokenizer.eos_id}
    found.token_ids = ids
    return found


def _in_folder(folder: Path) -> Beside:
    found = Beside({name: folder / name for name in NAMES if (folder / name).is_file()})
    for path in sorted((folder / TEMPLATES).glob("*.jinja")):
        found.files[f"{TEMPLATES}/{path.name}"] = path
    places = (folder / MODEL_FILE, folder / _KEPT_BY_THE_HUB)
    found.vocabulary = next((path for path in places if path.is_file()), None)
    return found


def _of_run(checkpoint: Path, context_length: int) -> Beside:
    """The tokenizer that a training checkpoint's run has, if it lies in one, and what its weights came with."""
    run = checkpoint.resolve().parents[2]  # <run>/train/checkpoints/step-...
    if not (run / "config.yaml").is_file():
        return Beside()
    folder = run_in(run).stage_folder("tokenizer")
    found = _in_folder(folder / "hf")
    found.vocabulary = folder / MODEL_FILE if (folder / MODEL_FILE).is_file() else None
    found.context_length = context_length
    if (kept := settings_file(checkpoint)).is_file():
        found.files[kept.name] = kept
        found.token_ids = {name: value for name, value in read_settings(kept).items() if name in IDS}
        return found
    try:
        record = vocabulary_record(folder)
        found.token_ids = {"bos_token_id": record["bos_id"], "eos_token_id": record["eos_id"]}
    except UserError:  # the tokenizer is gone; that there is none is said
        pass
    return found


def name_of_vocabulary(path: Path, form: str) -> str:
    """Where in a folder of a form a tokenizer.model belongs."""
    return _KEPT_BY_THE_HUB if form == "hf" and not _is_sentencepiece(path) else MODEL_FILE


def _is_sentencepiece(path: Path) -> bool:
    """Whether a tokenizer.model is sentencepiece's (Llama 2), not lines of base64 and ranks (Llama 3)."""
    with open(path, "rb") as file:
        return file.read(1) == b"\n"


def _tokenizer(path: Path, vocab_size: int) -> Tokenizer | None:
    """The tokenizer in a tokenizer.model; None if it is none, is of a larger vocabulary than the weights, or normalises
    text in a way that a tokenizer.json made of it would not."""
    from drover.pipeline.tokenization.export import hugging_face_tokenizer
    try:
        tokenizer = open_tokenizer("sentencepiece" if _is_sentencepiece(path) else "tiktoken", path)
    except UserError:
        return None
    exported = hugging_face_tokenizer(tokenizer).encode(_PROBE, add_special_tokens=False)
    return tokenizer if tokenizer.used <= vocab_size and exported.ids == tokenizer.encode(_PROBE) else None
