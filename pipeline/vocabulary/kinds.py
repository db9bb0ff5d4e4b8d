"""The kinds of vocabulary by name: which files they come from, and a finished tokenizer stage read back."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from pipeline.config.tree import Config
from pipeline.errors import UserError
from pipeline.files import read_json, sha256_file, write_json
from pipeline.vocabulary.base import Vocabulary

RECORD = "vocabulary.json"
FORMAT = 1
FILES = {"sentencepiece": "tokenizer.model", "tiktoken": "tokenizer.model", "huggingface": "tokenizer.json",
         "char": "characters.json", "byte": None}
"""The file that defines a vocabulary of each kind, in the tokenizer stage's folder."""
UINT16_IDS = 65536


def input_files(config: Config) -> list[tuple[str, Path]]:
    """The ready tokenizer that `tokenizer.path` names, and the Hugging Face settings beside it."""
    if config.tokenizer.path is None:
        return []
    path = Path(config.tokenizer.path)
    found = [("tokenizer", path)]
    if config.tokenizer.kind == "huggingface" and (beside := path.with_name("tokenizer_config.json")).is_file():
        found.append(("tokenizer_config", beside))
    return found


def token_dtype(vocab_size: int) -> str:
    """`uint16` where it holds every id, else `uint32`. Everything that stores tokens asks here."""
    return "uint16" if vocab_size <= UINT16_IDS else "uint32"


def open_vocabulary(kind: str, path: Path | None, bounds: tuple[str, str] | None = None) -> Vocabulary:
    """The vocabulary that a file defines (`byte` has none); `bounds` as for `HuggingFaceVocabulary`."""
    if kind == "byte":
        from pipeline.vocabulary.simple import ByteVocabulary
        return ByteVocabulary()
    assert path is not None, f"a {kind} vocabulary is read from a file"
    if kind == "char":
        from pipeline.vocabulary.simple import CharVocabulary
        return CharVocabulary(path)
    if kind == "sentencepiece":
        from pipeline.vocabulary.sentencepiece_vocabulary import SentencePieceVocabulary
        return SentencePieceVocabulary(path)
    if kind == "tiktoken":
        from pipeline.vocabulary.tiktoken_vocabulary import TiktokenVocabulary
        return TiktokenVocabulary(path)
    from pipeline.vocabulary.huggingface_vocabulary import HuggingFaceVocabulary
    return HuggingFaceVocabulary(path, bounds)


def write_record(folder: Path, vocabulary: Vocabulary) -> Path:
    """Describe the vocabulary in `vocabulary.json`, so that its size and ids are known without its library."""
    path = folder / RECORD
    write_json(path, {
        "format": FORMAT, "kind": vocabulary.kind, "size": vocabulary.size, "used": vocabulary.used,
        "bos_id": vocabulary.bos_id, "eos_id": vocabulary.eos_id, "unk_id": vocabulary.unk_id,
        "file": FILES[vocabulary.kind], "sha256": vocabulary.sha256, "special_tokens": dict(vocabulary.special_tokens)})
    return path


def vocabulary_record(folder: Path) -> dict[str, Any]:
    """What `vocabulary.json` in a finished tokenizer stage's folder says (kind, size, used, bos_id, eos_id, ...)."""
    path = folder / RECORD
    try:
        record = read_json(path)
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read ({error}). Run --stage tokenizer to make it again.") from None
    if record.get("format") != FORMAT:
        raise UserError(f"{path} is of format {record.get('format')}, this version of Drover reads {FORMAT}. "
                        f"Run --stage tokenizer with --force.")
    return dict(record)


def load_vocabulary(folder: Path) -> Vocabulary:
    """The vocabulary of a finished tokenizer stage.

    Raises:
        UserError: its file is missing or is not the one that the stage made.
    """
    record = vocabulary_record(folder)
    path = folder / record["file"] if record["file"] else None
    if path is not None and (not path.is_file() or sha256_file(path) != record["sha256"]):
        raise UserError(f"{path} is {'not the file' if path.is_file() else 'missing, not the one'} that "
                        f"{folder / RECORD} was written for. Run --stage tokenizer --force to make it again.")
    names = {token: name for name, token in record["special_tokens"].items()}
    return open_vocabulary(record["kind"], path, (names[record["bos_id"]], names[record["eos_id"]]))


def place(folder: Path, seen_from: Path) -> str:
    """Another stage's folder as a unit of work names it: relative, so that the unit stays done where a run is moved."""
    return os.path.relpath(folder, seen_from)


def placed(seen_from: Path, place: str) -> Path:
    """The folder that a `place` names."""
    return Path(os.path.normpath(seen_from / place))
