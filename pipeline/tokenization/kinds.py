"""The kinds of tokenizer by name: which files they come from, and a finished tokenizer stage read back."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypedDict

from drover.pipeline.core.errors import UserError
from drover.pipeline.core.files import LARGEST, Count, Inside, read_record, sha256_file, write_json
from drover.pipeline.tokenization.hub import fetched, names_the_hub

if TYPE_CHECKING:
    from drover.pipeline.config.data import TokenizerConfig
    from drover.pipeline.config.tree import Config
    from drover.pipeline.tokenization.base import Tokenizer

RECORD = "vocabulary.json"
FORMAT = 1
MODEL_FILE = "tokenizer.model"
FILES = {"sentencepiece": MODEL_FILE, "tiktoken": MODEL_FILE, "huggingface": "tokenizer.json", "bpe": MODEL_FILE,
         "char": "characters.json", "byte": None}
"""The file that defines a tokenizer of each kind, in the tokenizer stage's folder. `bpe` trains a tiktoken file, which
has the kind tiktoken from then on."""
COMPANIONS = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja")
"""Files that belong to a ready `tokenizer.json`: roles of special tokens, the BOS rule, the chat template."""


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
        UserError: it is a name on the Hub, and cannot be downloaded.
    """
    assert settings.path is not None
    path, name = Path(settings.path), FILES[settings.kind]
    if settings.kind == "huggingface" and names_the_hub(settings.path):
        path = fetched(settings.path, ["tokenizer.json", *COMPANIONS])
    return path / name if name is not None and path.is_dir() else path


def ready_problems(config: Config) -> list[str]:
    """Why the ready Hugging Face tokenizer that `tokenizer.path` names cannot be used, if it is there."""
    from drover.pipeline.tokenization.huggingface_tokenizer import HuggingFaceTokenizer, surrounding_problems
    if config.tokenizer.kind != "huggingface" or config.tokenizer.path is None or \
            not (path := ready_file(config.tokenizer)).is_file():
        return []
    try:
        return surrounding_problems(path, HuggingFaceTokenizer(path))
    except UserError as error:
        return [str(error)]


def files_beside(path: Path) -> list[Path]:
    """The files of COMPANIONS next to a `tokenizer.json`; none if the first is missing, which transformers needs."""
    found = [file for name in COMPANIONS if (file := path.with_name(name)).is_file()]
    return found if found and found[0].name == COMPANIONS[0] else []


def kind_of_model(path: Path) -> str:
    """The kind of a `tokenizer.model`: sentencepiece (Llama 2), or tiktoken, lines of base64 and ranks (Llama 3)."""
    with open(path, "rb") as file:
        return "sentencepiece" if file.read(1) == b"\n" else "tiktoken"


def open_tokenizer(kind: str, path: Path | None, bounds: tuple[str, str] | None = None) -> Tokenizer:
    """The tokenizer in a file (`byte` has none); `bounds` as for `HuggingFaceTokenizer`."""
    from drover.pipeline.tokenization import huggingface_tokenizer, sentencepiece_tokenizer, simple, tiktoken_tokenizer
    if kind == "byte":
        return simple.ByteTokenizer()
    assert path is not None, f"a {kind} tokenizer is read from a file"
    if kind == "huggingface":
        return huggingface_tokenizer.HuggingFaceTokenizer(path, bounds)
    classes: dict[str, Callable[[Path], Tokenizer]] = {
        "char": simple.CharTokenizer, "sentencepiece": sentencepiece_tokenizer.SentencePieceTokenizer,
            "tiktoken": tiktoken_tokenizer.TiktokenTokenizer, "bpe": tiktoken_tokenizer.TiktokenTokenizer}
    return classes[kind](path)


def write_record(folder: Path, tokenizer: Tokenizer) -> Path:
    """Describe the tokenizer in `vocabulary.json`, so that its size and ids are known without its library."""
    path = folder / RECORD
    write_json(path, {
        "format": FORMAT, "kind": tokenizer.kind, "size": tokenizer.size, "used": tokenizer.used,
        "bos_id": tokenizer.bos_id, "eos_id": tokenizer.eos_id, "unk_id": tokenizer.unk_id,
        "file": FILES[tokenizer.kind], "sha256": tokenizer.sha256, "special_tokens": dict(tokenizer.special_tokens)})
    return path


class Vocabulary(TypedDict):
    """The content of `vocabulary.json`."""

    format: int
    kind: Literal["sentencepiece", "tiktoken", "huggingface", "char", "byte"]
    size: Count
    used: Count
    bos_id: Count
    eos_id: Count
    unk_id: Count | None
    file: Inside | None
    sha256: str
    special_tokens: dict[str, Count]


def vocabulary_record(folder: Path) -> dict[str, Any]:
    """The `vocabulary.json` of a finished tokenizer stage. UserError if it cannot be read."""
    record = read_record(folder / RECORD, Vocabulary, "Run --stage tokenizer with --force.", FORMAT)
    if record is None:
        raise UserError(f"{folder / RECORD} is missing. Run --stage tokenizer to make it again.")
    return dict(record)


def load_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer of a finished tokenizer stage.

    Raises:
        UserError: its file is missing or is not the one that the stage made.
    """
    record = vocabulary_record(folder)
    path = folder / record["file"] if record["file"] else None
    if path is not None and (not path.is_file() or path.stat().st_size > LARGEST
                             or sha256_file(path) != record["sha256"]):
        raise UserError(f"{path} is {'not the file' if path.is_file() else 'missing, not the one'} that "
                        f"{folder / RECORD} was written for. Run --stage tokenizer --force to make it again.")
    names = {token: name for name, token in record["special_tokens"].items()}
    if (path is None and record["kind"] != "byte") or not {record["bos_id"], record["eos_id"]} <= names.keys():
        raise UserError(f"{folder / RECORD} is damaged: it names no file, BOS or EOS. Run --stage tokenizer --force.")
    return open_tokenizer(record["kind"], path, (names[record["bos_id"]], names[record["eos_id"]]))


def place(folder: Path, seen_from: Path) -> str:
    """Another stage's folder in a unit of work: a relative path, so that the unit stays done if the run is moved."""
    return os.path.relpath(folder, seen_from)


def placed(seen_from: Path, place: str) -> Path:
    """The folder of a `place`."""
    return Path(os.path.normpath(seen_from / place))
