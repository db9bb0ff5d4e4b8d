"""The tokenizer that every stage runs: the exported tokenizer.json, by the library `tokenizers`."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from drover.pipeline.core.errors import UserError
from drover.pipeline.core.files import parsed_json, read_bytes, sha256_file
from drover.pipeline.tokenization.files import EXPORT, RECORD, vocabulary_record

SIZE_MULTIPLE = 128
WORD_MARK = "\u2581"
"""sentencepiece's sign for a space inside a token. A document's own U+2581 is therefore decoded as a space."""

BOS = "<|begin_of_text|>"
EOS = "<|end_of_text|>"
PAD = "<|finetune_right_pad_id|>"
_NAMED = (BOS, EOS, "<|reserved_special_token_0|>", "<|reserved_special_token_1|>", PAD, "<|step_id|>",
          "<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>", "<|eot_id|>", "<|python_tag|>", "<|image|>")
SPECIAL_TOKENS = (*_NAMED, *(f"<|reserved_special_token_{number}|>" for number in range(2, 246)))
"""Llama 3's 256 special tokens in their order (names of Llama 3.1): most are free for later fine-tuning."""

MAX_PART = 400_000
MAX_RUN = 25_000
AT_ONCE = 8
"""Parts whose tokens are in memory as objects of the library, which take 150 times the bytes of the text."""
_RUNS = re.compile(r"\s+|\S+")

Flat = tuple[NDArray[np.uint32], NDArray[np.int64]]
"""Ids of several texts one after another, and their texts + 1 offsets: text i has ids[offsets[i]:offsets[i + 1]]."""


def padded(count: int) -> int:
    """`count` rounded up so that the embedding splits evenly and suits matrix units."""
    return -(-count // SIZE_MULTIPLE) * SIZE_MULTIPLE


def joined(arrays: Sequence[NDArray[Any]]) -> Flat:
    """The ids of several texts as one array, with the offset of each text."""
    offsets = np.cumsum([0, *map(len, arrays)], dtype=np.int64)
    ids = np.concatenate(arrays) if arrays else np.empty(0, np.uint32)
    return ids.astype(np.uint32, copy=False), offsets


def byte_of_character() -> dict[str, int]:
    """The byte of each printable character in byte-level BPE (GPT-2's table)."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [value for value in range(256) if value not in set(shown)]
    return {chr(value): value for value in shown} | {chr(256 + index): value for index, value in enumerate(hidden)}


def byte_piece(value: int) -> str:
    """sentencepiece's name of a byte token: `<0x0A>`."""
    return f"<0x{value:02X}>"


class Tokenizer:
    """Text to ids and back. Text never becomes special ids: `<|end_of_text|>` in a document stays text.

    Attributes:
        kind: `sentencepiece`, `tiktoken`, `huggingface`, `byte` or `char`: what the tokenizer was made from.
        backend: the `tokenizers.Tokenizer`.
        model: the type of its model, such as BPE.
        used: ids 0..used-1 have a meaning; the rest up to `size` are padding that no text produces.
        size: rows of the embedding: `used` rounded up to a multiple of 128.
        bounds: names of BOS and EOS, which the encode stage puts around every document; `encode` does not.
        unk_id: the id of unknown text, if there is one.
        special_tokens: name -> id of ids without text.
        added: texts, by id, of added tokens, which are matched before all others.
        byte_fallback_ids: ids that spell one byte of a character without a token of its own.
        sha256: hash of the file that defines the vocabulary.
    """

    def __init__(self, content: bytes, kind: str, bounds: tuple[str, str], sha256: str) -> None:
        from tokenizers import Tokenizer as Backend
        description = parsed_json(content)
        self.backend = library = Backend.from_str(content.decode())
        library.no_truncation()
        library.no_padding()
        library.encode_special_tokens = True  # their names in a document stay text
        self.kind, self.bounds, self.sha256 = kind, bounds, sha256
        ids = library.get_vocab()
        self._names = {token: name for name, token in ids.items()}
        self.used = max(self._names) + 1
        self.size = padded(self.used)
        self.bos_id, self.eos_id = (ids[name] for name in bounds)
        added = sorted(library.get_added_tokens_decoder().items())
        self.added = {index: token.content for index, token in added}
        self.special_tokens = {token.content: index for index, token in added if token.special}
        self.special_tokens |= zip(bounds, (self.bos_id, self.eos_id), strict=True)
        self.special_ids = frozenset(self.special_tokens.values())
        model = description["model"]
        self.model = model["type"]
        unknown = model.get("unk_token")
        self.unk_id = ids.get(unknown) if isinstance(unknown, str) else model.get("unk_id")
        pieces = map(byte_piece, range(256)) if model.get("byte_fallback") else ()
        self.byte_fallback_ids = frozenset(ids[name] for name in pieces if name in ids)
        self._decoder = json.dumps(description["decoder"], ensure_ascii=False)
        self._byte_of = byte_of_character() if '"type": "ByteLevel"' in self._decoder else {}

    def encode(self, text: str) -> list[int]:
        """The ids of `text`, without BOS and EOS."""
        ids: list[int] = self.encode_flat([text])[0].tolist()
        return ids

    def encode_flat(self, texts: Sequence[str]) -> Flat:
        """The result of `encode` for each text, without a Python object for each id."""
        return self.encoded_in_parts(texts, self._encode)

    def encoded_in_parts(self, texts: Sequence[str], encode: Callable[[list[str]], Flat]) -> Flat:
        """The ids of texts by an encoder of parts."""
        parts = [self.parts(text) for text in texts]
        ids, offsets = encode([part for own in parts for part in own])
        return ids, offsets[np.cumsum([0, *map(len, parts)])]

    def parts(self, text: str) -> list[str]:
        """The parts of a very long text that are encoded independently of each other; nearly always one.

        Meta's tokenizer of Llama 3 cuts a text every 400,000 characters, and every 25,000 characters of a run with or
        without white space. At such a cut, and only there, tokens may differ from those of a tokenizer that does not
        cut. Bytes and characters may be cut anywhere, which takes less memory.
        """
        if self.kind not in ("tiktoken", "byte", "char") or len(text) <= MAX_RUN:
            return [text]
        parts = [text[start:start + MAX_PART] for start in range(0, len(text), MAX_PART)]
        return [run for part in parts for run in _cut_runs(part)] if self.kind == "tiktoken" else parts

    def _encode(self, texts: list[str]) -> Flat:
        # "fast" leaves out where in the text each token lies.
        batches = (self.backend.encode_batch_fast(texts[start:start + AT_ONCE], add_special_tokens=False)
                   for start in range(0, len(texts), AT_ONCE))
        return joined([np.array(one.ids, np.uint32) for encoded in batches for one in encoded])

    def decode(self, ids: Sequence[int] | NDArray[Any]) -> str:
        """The text of `ids`; special and padding ids are left out, broken UTF-8 becomes U+FFFD."""
        known = np.asarray(ids, np.int64)
        for token in (known.min(), known.max()) if len(known) else ():
            self.checked(int(token))
        kept = (known < self.used) & ~np.isin(known, [*self.special_ids])
        text: str = self.backend.decode(known[kept].tolist())
        return text

    def joined_bytes(self, ids: Iterable[int]) -> bytes:
        """The `token_bytes` of the ids, joined; they must be of this vocabulary."""
        return b"".join(map(self._bytes_of_ids.__getitem__, ids))

    @cached_property
    def _bytes_of_ids(self) -> list[bytes]:
        return [self.token_bytes(token) for token in range(self.size)]

    def token_bytes(self, token: int) -> bytes:
        """The UTF-8 bytes of an id; b"" for special and padding ids.

        Joined over a document's ids they are the document's bytes, except for sentencepiece's mark (`reads_back`)
        and a space that the tokenizer may add in front (`checking.py`).
        """
        if self.checked(token) not in self._names or token in self.special_ids or token == self.unk_id:
            return b""
        name = self._names[token]
        if token in self.added:
            return self.added[token].encode()
        if token in self.byte_fallback_ids:
            return bytes([int(name[3:5], 16)])
        if self._byte_of:
            return bytes(self._byte_of[character] for character in name if character in self._byte_of)
        return (name.replace(WORD_MARK, " ") if WORD_MARK in self._decoder else name).encode()

    def checked(self, token: int) -> int:
        """`token` if it is an id of this vocabulary; ValueError otherwise."""
        if not 0 <= token < self.size:
            raise ValueError(f"{token} is not an id of this {self.kind} vocabulary of {self.size}")
        return token


def _cut_runs(text: str) -> list[str]:
    cuts = [0]
    for match in _RUNS.finditer(text):
        cuts += range(match.start() + MAX_RUN, match.end(), MAX_RUN)
    return [text[start:stop] for start, stop in zip(cuts, [*cuts[1:], len(text)], strict=True)]


def loses_marks(tokenizer: Tokenizer) -> bool:
    """Whether a literal U+2581 is decoded as a space."""
    return tokenizer.decode(tokenizer.encode(f"a{WORD_MARK}b")) == "a b"


def reads_back(text: str, decoded: str) -> bool:
    """Whether `decoded` is `text`. A literal U+2581 (sentencepiece's own mark) may be decoded as a space."""
    return decoded == text or (WORD_MARK in text and decoded == text.replace(WORD_MARK, " "))


def load_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer of a finished tokenizer stage.

    Raises:
        UserError: its file is missing or is not the one that the stage made.
    """
    record, path = vocabulary_record(folder), folder / EXPORT
    # Runs from before one tokenizer ran everywhere do not have its hash.
    if not path.is_file() or record.get("export_sha256") not in (None, sha256_file(path)):
        raise UserError(f"{path} is {'not the file' if path.is_file() else 'missing, not the one'} that "
                        f"{folder / RECORD} was written for. Run --stage tokenizer --force to make it again.")
    names = {token: name for name, token in record["special_tokens"].items()}
    if not {record["bos_id"], record["eos_id"]} <= names.keys():
        raise UserError(f"{folder / RECORD} is damaged: it names no BOS or EOS. Run --stage tokenizer --force.")
    bounds = names[record["bos_id"]], names[record["eos_id"]]
    return Tokenizer(read_bytes(path), record["kind"], bounds, record["sha256"])
