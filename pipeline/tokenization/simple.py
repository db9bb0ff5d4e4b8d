"""Vocabularies without merges, for small experiments: the 256 bytes, or the corpus's characters."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from drover.pipeline.core.errors import UserError
from drover.pipeline.core.files import read_record, sha256_file, write_json
from drover.pipeline.tokenization.base import Flat, Tokenizer, byte_piece, joined
from drover.pipeline.tokenization.byte_level import byte_level_tokenizer, byte_of_character

AGAIN = "Run --stage tokenizer with --force."


class ByteTokenizer(Tokenizer):
    """Ids 0..255 are the bytes of the UTF-8 text; the special ids follow. It has no file of its own."""

    kind = "byte"

    def __init__(self) -> None:
        self._add_special_tokens(256)
        self.sha256 = hashlib.sha256(bytes(range(256))).hexdigest()

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def encode_flat(self, texts: Sequence[str]) -> Flat:
        return joined([np.frombuffer(text.encode(), np.uint8) for text in texts])

    def token_bytes(self, token: int) -> bytes:
        return bytes([token]) if self.checked(token) < 256 else b""

    def hugging_face(self) -> Any:
        from tokenizers import models
        return byte_level_tokenizer(models.BPE(byte_of_character(), []))


@dataclass(frozen=True)
class Characters:
    """The file of a `CharTokenizer`."""

    characters: str


class CharTokenizer(Tokenizer):
    """The characters of the training split by code point, then 256 bytes, then the special ids.

    Other characters are spelled in bytes, so nothing is lost and the validation loss stays honest. With one id for all
    unknown characters, the model could predict several bytes at once.
    """

    kind = "char"

    def __init__(self, path: Path) -> None:
        record = read_record(path, Characters, AGAIN)
        self.characters = record.characters if record else ""
        if len(set(self.characters)) != max(1, len(self.characters)):
            raise UserError(f"{path} is not a list of different characters. {AGAIN}")
        self._ids = {character: index for index, character in enumerate(self.characters)}
        self._first_byte = len(self.characters)
        self.byte_fallback_ids = frozenset(range(self._first_byte, self._first_byte + 256))
        self._add_special_tokens(self._first_byte + 256)
        self.sha256 = sha256_file(path)

    def encode(self, text: str) -> list[int]:
        ids: list[int] = []
        for character in text:
            known = self._ids.get(character)
            if known is None:
                ids.extend(self._first_byte + value for value in character.encode())
            else:
                ids.append(known)
        return ids

    def token_bytes(self, token: int) -> bytes:
        if self.checked(token) < self._first_byte:
            return self.characters[token].encode()
        return bytes([token - self._first_byte]) if token in self.byte_fallback_ids else b""

    def hugging_face(self) -> Any:
        from tokenizers import Tokenizer, decoders, models
        ids = self._ids | {byte_piece(value): self._first_byte + value for value in range(256)}
        tokenizer = Tokenizer(models.BPE(ids, [], byte_fallback=True))
        tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
        return tokenizer


def write_characters(path: Path, texts: Iterable[str]) -> None:
    """Collect the characters of `texts` into the file of a `CharTokenizer`."""
    seen: set[str] = set()
    for text in texts:
        seen.update(text)
    if not seen:
        raise UserError("There is no training text to take characters from. Look at the shard stage's sources.")
    write_json(path, {"characters": "".join(sorted(seen))})
