"""A tokenizer as a Hugging Face tokenizer folder with the same ids."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from drover.pipeline.core.files import copy_file, read_record, write_json, write_text
from drover.pipeline.tokenization.base import PAD, Tokenizer
from drover.pipeline.tokenization.huggingface_tokenizer import SETTINGS, TAKE_AGAIN

CODE = "auto_map"
"""The key of a transformers config that names Python files to download and run."""
SPLIT = "split_special_tokens"
"""Whether names of special tokens inside a text are text. Earlier exports say so, which breaks every chat template."""
PREFIX = "add_prefix_space"
"""Where llama.cpp's converter searches for the rule of a sentencepiece model, which tokenizer.json has, too."""


def write_hugging_face(tokenizer: Tokenizer, folder: Path) -> list[Path]:
    """Write `tokenizer.json` and `tokenizer_config.json` for `transformers.AutoTokenizer`; returns their paths.

    As with Llama 3, BOS is put before a text by default (`add_special_tokens=True`) and no EOS after it, and names of
    special tokens inside a text are those tokens, which chat templates need. In Drover's own encoding they are text.
    """
    exported = hugging_face_tokenizer(tokenizer)
    bos, eos = tokenizer.bounds
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": bos, "eos_token": eos,
        "clean_up_tokenization_spaces": False, SPLIT: False}
    if PAD in tokenizer.special_tokens:
        settings["pad_token"] = PAD
    if tokenizer.prefix_space is not None:
        settings[PREFIX] = tokenizer.prefix_space
    paths = [folder / "tokenizer.json", folder / "tokenizer_config.json"]
    write_text(paths[0], exported.to_str(pretty=True))
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
    if path.name != SETTINGS:
        return False
    return CODE in (read_record(path, dict[str, Any], TAKE_AGAIN) or {})


def names_qwen2(path: Path) -> bool:
    """Whether a tokenizer_config.json names Qwen2's class, which transformers takes next to any Qwen2."""
    named = (read_record(path, dict[str, Any], TAKE_AGAIN) or {}).get("tokenizer_class")
    return named in ("Qwen2Tokenizer", "Qwen2TokenizerFast")


def settings_text(path: Path, context_length: int | None = None, prefix_space: bool | None = None) -> str:
    """The text of a tokenizer_config.json without CODE, and with SPLIT switched off if it is on.

    Args:
        context_length: replaces `model_max_length` if that is set, in tokens. A ready tokenizer has the value of the
            model that it came with, and callers truncate texts there.
        prefix_space: the tokenizer's; for files from before PREFIX was written.
    """
    said = read_record(path, dict[str, Any], TAKE_AGAIN) or {}
    settings = {name: value for name, value in said.items() if name != CODE}
    if context_length is not None and settings.get("model_max_length") is not None:
        settings["model_max_length"] = context_length
    if prefix_space is not None:
        settings.setdefault(PREFIX, prefix_space)
    if settings.get(SPLIT):
        settings[SPLIT] = False
    if settings == said:
        return path.read_bytes().decode()
    return json.dumps(settings, indent=1, ensure_ascii=False) + "\n"


def hugging_face_tokenizer(tokenizer: Tokenizer) -> Any:
    """A `tokenizers.Tokenizer` that gives the vocabulary's ids, with BOS before the text by default."""
    from tokenizers import AddedToken
    from tokenizers.processors import TemplateProcessing
    exported = tokenizer.hugging_face()
    by_id = sorted(tokenizer.special_tokens.items(), key=lambda item: item[1])
    exported.add_special_tokens([AddedToken(name, special=True, normalized=False) for name, _ in by_id])
    bos, _ = tokenizer.bounds
    exported.post_processor = TemplateProcessing(single=[bos, "$A"], pair=[bos, "$A", f"{bos}:1", "$B:1"],
                                                  special_tokens=[(bos, tokenizer.bos_id)])
    return exported
