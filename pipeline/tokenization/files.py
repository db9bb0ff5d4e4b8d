"""The files of a tokenizer: those of a finished tokenizer stage, the ready ones that `tokenizer.path` names, and the
settings of transformers next to a tokenizer.json."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypedDict

from drover.pipeline.core.errors import UserError
from drover.pipeline.core.files import Count, Inside, copy_file, read_record, sha256_file, write_json, write_text
from drover.pipeline.storage.model_hub import hub_folder, names_the_hub

if TYPE_CHECKING:
    from drover.pipeline.config.data import TokenizerConfig
    from drover.pipeline.config.tree import Config
    from drover.pipeline.tokenization.tokenizer import Tokenizer

RECORD = "vocabulary.json"
FORMAT = 1
MODEL_FILE = "tokenizer.model"
FILES = {"sentencepiece": MODEL_FILE, "tiktoken": MODEL_FILE, "huggingface": "tokenizer.json", "bpe": MODEL_FILE,
         "char": "characters.json", "byte": None}
"""The file that a tokenizer of each kind is made from, in the tokenizer stage's folder. `bpe` trains a tiktoken file,
which has the kind tiktoken from then on."""
EXPORT = "hf/tokenizer.json"
"""The tokenizer in the tokenizer stage's folder, as it is exported and run."""
SETTINGS = "tokenizer_config.json"
COMPANIONS = (SETTINGS, "special_tokens_map.json", "added_tokens.json", "chat_template.jinja")
"""Files that belong to a ready `tokenizer.json`: roles of special tokens, the BOS rule, the chat template."""
CODE = "auto_map"
"""The key of a transformers config that names Python files to download and run."""
SPLIT = "split_special_tokens"
"""Whether names of special tokens inside a text are text. It would break every chat template."""


class Exported(TypedDict, total=False):
    """What runs do not have from before one tokenizer ran everywhere."""

    export_sha256: str


class Vocabulary(Exported):
    """The content of `vocabulary.json`: a tokenizer's size and ids, known without its library."""

    kind: Literal["sentencepiece", "tiktoken", "huggingface", "char", "byte"]
    size: Count
    bos_id: Count
    eos_id: Count
    file: Inside | None
    sha256: str
    special_tokens: dict[str, Count]


def write_record(folder: Path, tokenizer: Tokenizer) -> Path:
    """Describe the tokenizer that is exported in `folder` in its `vocabulary.json`."""
    path = folder / RECORD
    write_json(path, {
        "format": FORMAT, "kind": tokenizer.kind, "size": tokenizer.size, "used": tokenizer.used,
        "bos_id": tokenizer.bos_id, "eos_id": tokenizer.eos_id, "unk_id": tokenizer.unk_id,
        "file": FILES[tokenizer.kind], "sha256": tokenizer.sha256, "special_tokens": tokenizer.special_tokens,
        "export_sha256": sha256_file(folder / EXPORT)})
    return path


def vocabulary_record(folder: Path) -> Vocabulary:
    """The `vocabulary.json` of a finished tokenizer stage. UserError if it cannot be read."""
    record = read_record(folder / RECORD, Vocabulary, "Run --stage tokenizer with --force.", FORMAT)
    if record is None:
        raise UserError(f"{folder / RECORD} is missing. Run --stage tokenizer to make it again.")
    return record


def place(folder: Path, seen_from: Path) -> str:
    """Another stage's folder in a unit of work: a relative path, so that the unit stays done if the run is moved."""
    return os.path.relpath(folder, seen_from)


def placed(seen_from: Path, place: str) -> Path:
    """The folder of a `place`."""
    return Path(os.path.normpath(seen_from / place))


def input_files(config: Config) -> list[tuple[str, Path]]:
    """The ready tokenizer that `tokenizer.path` names, and the files that belong to a Hugging Face tokenizer."""
    if config.tokenizer.path is None:
        return []
    path = ready_file(config.tokenizer)
    beside = files_beside(path) if config.tokenizer.kind == "huggingface" else []
    return [("tokenizer", path), *((file.stem, file) for file in beside)]


def ready_file(settings: TokenizerConfig) -> Path:
    """The file of a ready tokenizer: `tokenizer.path` itself, or in the folder or on the Hub that it names.

    Raises:
        UserError: it is a name on the Hub, and not in the cache.
    """
    assert settings.path is not None
    path, name = Path(settings.path), FILES[settings.kind]
    if names_the_hub(settings.path):
        path = hub_folder(settings.path)
        if settings.kind == "tiktoken" and (original := path / "original").is_dir():  # Llama 3's place for it
            path = original
    return path / name if name is not None and path.is_dir() else path


def files_beside(path: Path) -> list[Path]:
    """The files of COMPANIONS next to a `tokenizer.json`; none if the first is missing, which transformers needs."""
    result = [file for name in COMPANIONS if (file := path.with_name(name)).is_file()]
    return result if result and result[0].name == SETTINGS else []


def kind_of_model(path: Path) -> str:
    """The kind of a `tokenizer.model`: sentencepiece (Llama 2), or tiktoken, lines of base64 and ranks (Llama 3)."""
    with open(path, "rb") as file:
        return "sentencepiece" if file.read(1) == b"\n" else "tiktoken"


def settings_beside(path: Path) -> Mapping[str, Any]:
    """The tokenizer_config.json next to a file; nothing if there is none."""
    return read_record(path.with_name(SETTINGS), dict[str, Any], "Take it from the tokenizer's source again.") or {}


def copy_hugging_face(path: Path, beside: Sequence[Path], folder: Path) -> list[Path]:
    """Export a ready Hugging Face tokenizer unchanged, byte for byte. So `AutoTokenizer`, chat templates, special
    tokens and the BOS rule work as in the original. Only names of code (CODE) are left out."""
    copies = {folder / "tokenizer.json": path, **{folder / file.name: file for file in beside}}
    for target, source in copies.items():
        if names_code(source):
            write_text(target, settings_text(source))
        else:
            copy_file(source, target)
    return list(copies)


def names_code(path: Path) -> bool:
    """Whether a file is a tokenizer_config.json that names Python files for transformers to run."""
    return path.name == SETTINGS and CODE in settings_beside(path)


def settings_text(path: Path, context_length: int | None = None) -> str:
    """The text of a tokenizer_config.json without CODE, and with SPLIT switched off if it is on.

    Args:
        context_length: replaces `model_max_length` if that is set, in tokens. A ready tokenizer has the value of the
            model that it came with, and callers truncate texts there.
    """
    original = settings_beside(path)
    settings = {name: value for name, value in original.items() if name != CODE}
    if context_length is not None and settings.get("model_max_length") is not None:
        settings["model_max_length"] = context_length
    if settings.get(SPLIT):
        settings[SPLIT] = False
    if settings == original:
        return path.read_bytes().decode()
    return json.dumps(settings, indent=1, ensure_ascii=False) + "\n"
