"""Llama 3's own tokenizer format: byte-level BPE ranks, run by tiktoken."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from drover.pipeline.core.errors import UserError
from drover.pipeline.core.files import read_bytes, sha256_file
from drover.pipeline.tokenization.base import Flat, Tokenizer, joined
from drover.pipeline.tokenization.byte_level import byte_level_tokenizer, byte_of_character, merges

LLAMA3_PATTERN = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
                  r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
"""How Llama 3 splits text before merging."""

MAX_PART = 400_000
MAX_RUN = 25_000
_RUNS = re.compile(r"\s+|\S+")


class TiktokenTokenizer(Tokenizer):
    """Ranks from a `tokenizer.model` of base64 lines, split by Llama 3's pattern; the special ids follow them."""

    kind = "tiktoken"

    def __init__(self, path: Path) -> None:
        """Read the ranks; UserError if the file is not of this form."""
        from tiktoken import Encoding
        self.ranks = read_ranks(path)
        self._add_special_tokens(len(self.ranks))
        self._encoding = Encoding(path.name, pat_str=LLAMA3_PATTERN, mergeable_ranks=self.ranks,
                                  special_tokens=dict(self.special_tokens))
        self._bytes = sorted(self.ranks, key=self.ranks.__getitem__)
        self.sha256 = sha256_file(path)

    def encode(self, text: str) -> list[int]:
        return [token for part in self.parts(text) for token in self._encoding.encode_ordinary(part)]

    def encode_flat(self, texts: Sequence[str]) -> Flat:
        return joined([self._array(text) for text in texts])

    def _array(self, text: str) -> NDArray[np.uint32]:
        parts = [self._encoding.encode_to_numpy(part, disallowed_special=()) for part in self.parts(text)]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def parts(self, text: str) -> list[str]:
        # tiktoken's pattern engine overflows its stack on very long runs of white space (a Rust panic, not an error),
        # and takes ever longer on runs without any. Meta's tokenizer therefore cuts the text every 400,000 characters
        # and every 25,000 characters of such a run; the same cuts give the same ids as theirs. At such a cut, and only
        # there, tokens may differ from those of a tokenizer that does not cut.
        found = []
        for start in range(0, max(len(text), 1), MAX_PART):
            found += _cut_runs(text[start:start + MAX_PART])
        return found

    def token_bytes(self, token: int) -> bytes:
        return self._bytes[token] if self.checked(token) < len(self._bytes) else b""

    def hugging_face(self) -> Any:
        from tokenizers import models
        shown = {value: character for character, value in byte_of_character().items()}
        ids = {"".join(shown[value] for value in token): rank for token, rank in self.ranks.items()}
        # ignore_merges: like tiktoken, take a split-off piece that is a token whole, without merging up to it.
        return byte_level_tokenizer(models.BPE(ids, merges(ids, ids.__getitem__), ignore_merges=True), LLAMA3_PATTERN)


def read_ranks(path: Path) -> dict[bytes, int]:
    """The `base64 rank` lines of a file, ranks counted from 0; UserError naming the line that is not one."""
    ranks: dict[bytes, int] = {}
    try:
        lines = read_bytes(path).splitlines()
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}. Correct tokenizer.path.") from None
    for number, line in enumerate(lines, 1):
        if not line:
            continue
        try:
            text, rank = line.split()
            ranks[base64.b64decode(text, validate=True)] = int(rank)
        except (ValueError, binascii.Error):
            raise UserError(f"{path}:{number}: not a line of Llama 3's tokenizer.model (base64, a space, a rank). "
                            f"For a sentencepiece file take tokenizer.kind=sentencepiece, for a tokenizer.json "
                            f"tokenizer.kind=huggingface.") from None
    missing = sum(bytes([value]) not in ranks for value in range(256))
    if sorted(ranks.values()) != list(range(len(ranks))) or missing:
        raise UserError(f"{path} has {len(ranks)} different tokens, but their ranks do not run from 0 to "
                        f"{len(ranks) - 1}, or some of the 256 single bytes are missing ({missing}). It is damaged.")
    return ranks


def _cut_runs(text: str) -> list[str]:
    if len(text) <= MAX_RUN:
        return [text]
    cuts = [0]
    for match in _RUNS.finditer(text):
        cuts += range(match.start() + MAX_RUN, match.end(), MAX_RUN)
    return [text[start:stop] for start, stop in zip(cuts, [*cuts[1:], len(text)], strict=True)]
