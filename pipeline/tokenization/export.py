"""A tokenizer as a Hugging Face tokenizer folder."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from drover.pipeline.core.files import copy_file, write_json, write_text
from drover.pipeline.tokenization.conversion import complete
from drover.pipeline.tokenization.files import SETTINGS
from drover.pipeline.tokenization.ready import settings_beside
from drover.pipeline.tokenization.tokenizer import PAD, Tokenizer

CODE = "auto_map"
"""The key of a transformers config that names Python files to download and run."""
SPLIT = "split_special_tokens"
"""Whether names of special tokens inside a text are text. It would break every chat template."""


def write_hugging_face(tokenizer: Tokenizer, folder: Path) -> list[Path]:
    """Write `tokenizer.json` and `tokenizer_config.json` for `transformers.AutoTokenizer`; returns their paths.

    As with Llama 3, BOS is put before a text by default (`add_special_tokens=True`) and no EOS after it, and names of
    special tokens inside a text are those tokens, which chat templates need. In Drover's own encoding they are text.
    """
    (bos, eos), library = tokenizer.bounds, tokenizer.backend
    complete(library, tokenizer.special_tokens, bos)
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": bos, "eos_token": eos,
        "clean_up_tokenization_spaces": False, SPLIT: False}
    if PAD in tokenizer.special_tokens:
        settings["pad_token"] = PAD
    if tokenizer.kind == "sentencepiece":  # llama.cpp's converter searches for the rule of the model here
        settings["add_prefix_space"] = "Prepend" in repr(library.normalizer)
    paths = [folder / "tokenizer.json", folder / SETTINGS]
    write_text(paths[0], library.to_str(pretty=True))
    write_json(paths[1], settings)
    return paths


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


def names_qwen2(path: Path) -> bool:
    """Whether a tokenizer_config.json names Qwen2's class, which transformers takes next to any Qwen2."""
    return settings_beside(path).get("tokenizer_class") in ("Qwen2Tokenizer", "Qwen2TokenizerFast")


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
