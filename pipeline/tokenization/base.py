"""The interface of all tokenizers, and the special tokens that Drover's own ones share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

SIZE_MULTIPLE = 128
_AT_ONCE = 1 << 20
"""Ids that are Python objects at one time while a text is decoded."""
WORD_MARK = "\u2581"
"""sentencepiece's sign for a space inside a token. A document's own U+2581 is therefore decoded as a space."""

BOS = "<|begin_of_text|>"
EOS = "<|end_of_text|>"
PAD = "<|finetune_right_pad_id|>"
_NAMED = (BOS, EOS, "<|reserved_special_token_0|>", "<|reserved_special_token_1|>", PAD, "<|step_id|>",
          "<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>", "<|eot_id|>", "<|python_tag|>", "<|image|>")
SPECIAL_TOKENS = (*_NAMED, *(f"<|reserved_special_token_{number}|>" for number in range(2, 246)))
"""Llama 3's 256 special tokens in their order (names of Llama 3.1): most are free for later fine-tuning."""


def padded(count: int) -> int:
    """`count` rounded up so that the embedding splits evenly and suits matrix units."""
    return -(-count // SIZE_MULTIPLE) * SIZE_MULTIPLE


Flat = tuple[NDArray[np.uint32], NDArray[np.int64]]
"""Ids of several texts one after another, and their texts + 1 offsets: text i has ids[offsets[i]:offsets[i + 1]]."""


def joined(arrays: Sequence[NDArray[Any]]) -> Flat:
    """The ids of several texts as one array, with the offset of each text."""
    offsets = np.cumsum([0, *map(len, arrays)], dtype=np.int64)
    ids = np.concatenate(arrays) if arrays else np.empty(0, np.uint32)
    return ids.astype(np.uint32, copy=False), offsets


def encoded_flat(tokenizer: Any, texts: Sequence[str]) -> Flat:
    """The ids that a `tokenizers.Tokenizer` gives, without special ones."""
    # "fast" leaves out where in the text each token lies.
    found = tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
    return joined([np.array(one.ids, np.uint32) for one in found])


def byte_piece(value: int) -> str:
    """sentencepiece's name of a byte token: `<0x0A>`."""
    return f"<0x{value:02X}>"


class Tokenizer(ABC):
    """Text to ids and back. Text never becomes special ids: `<|end_of_text|>` in a document stays text.

    Attributes:
        kind: `sentencepiece`, `tiktoken`, `huggingface`, `byte` or `char`.
        used: ids 0..used-1 have a meaning; the rest up to `size` are padding that no text produces.
        bos_id, eos_id: put before and after every document by the encode stage, never by `encode`.
        unk_id: the id of unknown text, if there is one.
        special_tokens: name -> id of ids without text.
        added: texts, by id, of added tokens, which are matched before all others.
        byte_fallback_ids: ids that spell one byte of a character without a token of its own.
        merges_by_score: whether it is a sentencepiece model of type BPE, whose pieces have the scores of merges.
        prefix_space: whether a sentencepiece model puts a space before a text; None for other kinds.
        sha256: hash of the file that defines the vocabulary.
    """

    kind: str
    used: int
    bos_id: int
    eos_id: int
    unk_id: int | None = None
    special_tokens: Mapping[str, int]
    added: Mapping[int, str] = MappingProxyType({})
    byte_fallback_ids: frozenset[int] = frozenset()
    merges_by_score: bool = False
    prefix_space: bool | None = None
    sha256: str

    @property
    def size(self) -> int:
        """Rows of the embedding: `used` rounded up to a multiple of 128."""
        return padded(self.used)

    def _add_special_tokens(self, first: int) -> None:
        """Give the special tokens of Llama 3 the ids from `first` on."""
        self.special_tokens = {name: first + index for index, name in enumerate(SPECIAL_TOKENS)}
        self.used = first + len(SPECIAL_TOKENS)
        self.bos_id, self.eos_id = self.special_tokens[BOS], self.special_tokens[EOS]

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """The ids without text."""
        return frozenset(self.special_tokens.values())

    @property
    def bounds(self) -> tuple[str, str]:
        """The names of BOS and EOS."""
        names = {token: name for name, token in self.special_tokens.items()}
        return names[self.bos_id], names[self.eos_id]

    @abstractmethod
    def encode(self, text: str) -> list[int]:
        """The ids of `text`, without BOS and EOS."""

    def encode_flat(self, texts: Sequence[str]) -> Flat:
        """The result of `encode` for each text, without a Python object for each id if the library allows that."""
        return joined([np.array(self.encode(text), np.uint32) for text in texts])

    def parts(self, text: str) -> list[str]:
        """The parts of a very long text that are encoded independently of each other; nearly always one."""
        return [text]

    def decode(self, ids: Sequence[int] | NDArray[Any]) -> str:
        """The text of `ids`; special and padding ids are left out, broken UTF-8 becomes U+FFFD."""
        known = self.all_checked(ids)
        parts = (self.joined_bytes(known[start:start + _AT_ONCE].tolist()) for start in range(0, len(known), _AT_ONCE))
        return b"".join(parts).decode("utf-8", errors="replace")

    def joined_bytes(self, ids: Iterable[int]) -> bytes:
        """The `token_bytes` of the ids, joined; they must be of this vocabulary."""
        return b"".join(map(self._bytes_of_ids.__getitem__, ids))

    @cached_property
    def _bytes_of_ids(self) -> list[bytes]:
        return [self.token_bytes(token) for token in range(self.size)]

    @abstractmethod
    def token_bytes(self, token: int) -> bytes:
        """The UTF-8 bytes of an id; b"" for special and padding ids.

        Joined over a document's ids they are the document's bytes, except for sentencepiece's mark (`reads_back`)
        and a space that the tokenizer may add in front (`checking.py`).
        """

    @abstractmethod
    def hugging_face(self) -> Any:
        """A `tokenizers.Tokenizer` with the same ids, without special tokens and BOS (see `export`)."""

    def checked(self, token: int) -> int:
        """`token` if it is an id of this vocabulary; ValueError otherwise."""
        if not 0 <= token < self.size:
            raise ValueError(f"{token} is not an id of this {self.kind} vocabulary of {self.size}")
        return token

    def all_checked(self, ids: Sequence[int] | NDArray[Any]) -> NDArray[np.int64]:
        """The ids if all are of this vocabulary; ValueError otherwise."""
        array = np.asarray(ids, np.int64)
        for token in (array.min(), array.max()) if len(array) else ():
            self.checked(int(token))
        return array


def loses_marks(tokenizer: Tokenizer) -> bool:
    """Whether a literal U+2581 is decoded as a space."""
    return tokenizer.decode(tokenizer.encode(f"a{WORD_MARK}b")) == "a b"


def reads_back(text: str, decoded: str) -> bool:
    """Whether `decoded` is `text`. A literal U+2581 (sentencepiece's own mark) may be decoded as a space."""
    return decoded == text or (WORD_MARK in text and decoded == text.replace(WORD_MARK, " "))
