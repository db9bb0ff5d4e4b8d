"""A faster encoder of the same ids: fastokens (optional extra `fast`) over a finished tokenizer's files.

It never decides what the ids are. It is used only after an equivalence test with the reference
(`drover.pipeline.tokenization.gate`), and every shard is compared with the reference again (`drover.pipeline.encode`).
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from drover.pipeline.core.errors import install, installed_version
from drover.pipeline.core.files import read_json
from drover.pipeline.tokenization.base import Flat, Tokenizer

NAME = "fastokens"
KINDS = ("sentencepiece", "tiktoken", "huggingface")
"""Kinds of vocabulary that it supports."""
NOT_TAKEN = ("post_processor", "truncation", "padding")
"""Parts of a tokenizer.json that add or remove ids. Drover puts BOS and EOS around documents itself, and truncates
nothing."""


class EncoderError(Exception):
    """The fast encoder cannot open the vocabulary, or failed on a text; the message says why."""


def one_thread() -> None:
    """Limit the libraries written in Rust to one thread in this process: there is a process per core. Call it before
    their first use."""
    os.environ.setdefault("RAYON_NUM_THREADS", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


class FastEncoder:
    """Texts to ids, as `reference` gives them. Very long texts are cut where the reference cuts them."""

    def __init__(self, reference: Tokenizer, folder: Path) -> None:
        """Open the vocabulary of a finished tokenizer stage; EncoderError if the library refuses it or is absent."""
        if reference.kind not in KINDS:
            raise EncoderError(f"it does not support tokenizer.kind {reference.kind}")
        if installed_version(NAME) is None:
            raise EncoderError(f"it is several times faster, but not installed ({install(NAME)} installs it)")
        one_thread()
        self.reference = reference
        path = folder / ("tokenizer.model" if reference.kind == "tiktoken" else "hf/tokenizer.json")
        self._native = _guarded(lambda: _opened(path, reference.kind))

    def encode_flat(self, texts: Sequence[str]) -> Flat:
        """As `Tokenizer.encode_flat`; EncoderError if the library fails, or gives an id outside the vocabulary, BOS or
        EOS."""
        parts = [self.reference.parts(text) for text in texts]
        pieces = [piece for part in parts for piece in part]
        raw, ends = _guarded(lambda: self._native.encode_batch_flat(pieces, False, True))
        ids, offsets = np.frombuffer(raw, "<u4"), np.frombuffer(ends, "<u8").astype(np.int64)
        if len(offsets) != len(pieces) + 1 or offsets[-1] != len(ids):
            raise EncoderError(f"it gave {len(offsets)} offsets up to {offsets[-1:]} for {len(pieces)} texts")
        if len(ids) and ids.max() >= self.reference.size:
            raise EncoderError(f"it gave the id {ids.max()}, outside the vocabulary of {self.reference.size}")
        if ((ids == self.reference.bos_id) | (ids == self.reference.eos_id)).any():
            raise EncoderError("it made BOS or EOS of text")
        return ids, offsets[np.cumsum([0, *map(len, parts)])]


def _opened(path: Path, kind: str) -> Any:
    import fastokens
    if kind == "tiktoken":
        from drover.pipeline.tokenization.tiktoken_tokenizer import LLAMA3_PATTERN
        return fastokens.Tokenizer.from_tiktoken(str(path), LLAMA3_PATTERN, {})
    return fastokens.Tokenizer.from_json_str(_without_specials(read_json(path)))


def _without_specials(description: dict[str, Any]) -> str:
    """A tokenizer.json without its special tokens: their names in a text are text. Other added tokens are still matched
    in texts, as by the reference."""
    kept = [token for token in description.get("added_tokens") or [] if not token.get("special")]
    return json.dumps({**description, "added_tokens": kept, **dict.fromkeys(NOT_TAKEN)})


def _guarded(call: Any) -> Any:
    try:
        return call()
    except (KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException as error:  # noqa: BLE001 - a panic in Rust arrives as a class that is not even an Exception
        raise EncoderError(f"{type(error).__name__}: {str(error).strip()[:300]}") from None
