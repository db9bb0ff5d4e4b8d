"""The tokenizer that every stage runs: the exported tokenizer.json, by the library `tokenizers`; a faster encoder of
the same ids; and strings with which encoders are compared.

The faster encoder never decides what the ids are. Decoding to the same text proves little, since other ids can do that,
too. So the ids themselves are compared with the tokenizer's: on validation documents and odd strings once the tokenizer
is made (`checking.compared`), and on some documents of every shard (`drover.pipeline.encode`).
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from drover.pipeline.core.errors import UserError, install, installed_version
from drover.pipeline.core.files import read_bytes, read_json, sha256_file
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

PROMPT_IDS = 200
"""Ids of a document whose first words become a prompt."""
MOST_PROMPTS = 6
AT_ONCE = 8
"""Texts whose tokens are in memory as objects of the library, which take 150 times the bytes of the text."""
NAME = "fastokens"
NOT_TAKEN = ("post_processor", "truncation", "padding")
"""Parts of a tokenizer.json that add or remove ids. Drover puts BOS and EOS around documents itself, and truncates
nothing."""
NO_TEXT = "\U0010ffff"
"""A code point that Unicode reserves for programs, which is no character of a text."""

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

    def __init__(self, library: Any, kind: str, bounds: tuple[str, str], sha256: str) -> None:
        self.backend = library
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
        description = json.loads(library.to_str())
        model = description["model"]
        self.model = model["type"]
        unknown = model.get("unk_token")
        self.unk_id = model.get("unk_id") if unknown is None else ids.get(unknown)
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
        # "fast" leaves out where in the text each token lies.
        batches = (self.backend.encode_batch_fast([*texts[start:start + AT_ONCE]], add_special_tokens=False)
                   for start in range(0, len(texts), AT_ONCE))
        return joined([np.array(one.ids, np.uint32) for encoded in batches for one in encoded])

    def decode(self, ids: Sequence[int] | NDArray[Any]) -> str:
        """The text of `ids`; special and padding ids are left out, broken UTF-8 becomes U+FFFD. ValueError for an id
        outside the vocabulary."""
        known = np.asarray(ids, np.int64)
        if len(beyond := known[(known < 0) | (known >= self.size)]):
            raise ValueError(f"{beyond[0]} is not an id of this {self.kind} vocabulary of {self.size}")
        kept = (known < self.used) & ~np.isin(known, [*self.special_ids])
        text: str = self.backend.decode(known[kept].tolist())
        return text

    def beginnings(self, sources: Collection[Sequence[NDArray[Any]]]) -> list[str]:
        """The first words of the first documents of each source, as prompts. Documents without words, and sources
        after MOST_PROMPTS, have none. sources: the ids of their documents."""
        each = max(1, 3 // max(1, len(sources)))
        prompts = (" ".join(self.decode(ids[:PROMPT_IDS]).split()[:4])[:40]
                   for documents in sources for ids in islice(documents, each))
        return [*islice(filter(None, prompts), MOST_PROMPTS)]

    def surrounded(self, ids: list[int]) -> list[list[int]]:
        """The ids of a text with BOS before them or not, and with EOS after them or not."""
        return [[*first, *ids, *last] for first in ([], [self.bos_id]) for last in ([], [self.eos_id])]

    def token_bytes(self, token: int) -> bytes:
        """The UTF-8 bytes of an id; b"" for special and padding ids.

        Joined over a document's ids they are the document's bytes, except for sentencepiece's mark (`reads_back`)
        and a space that the tokenizer may add in front.
        """
        if token not in self._names or token in self.special_ids or token == self.unk_id:
            return b""
        name = self._names[token]
        if token in self.added:
            return self.added[token].encode()
        if token in self.byte_fallback_ids:
            return bytes([int(name[3:5], 16)])
        if self._byte_of:
            return bytes(self._byte_of[character] for character in name if character in self._byte_of)
        return (name.replace(WORD_MARK, " ") if WORD_MARK in self._decoder else name).encode()


class TokenBytes:
    """The text of many ids at once, by a table of the bytes of each.

    It is what the ids decode to: exactly, but for a literal U+2581 of sentencepiece, which is a space here. Bytes that
    are not UTF-8 stay as they are.

    Attributes:
        lengths: (ids of the vocabulary,) the UTF-8 bytes of each.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        pieces = list(map(tokenizer.token_bytes, range(tokenizer.size)))
        self.lengths = np.array(list(map(len, pieces)), np.int32)
        self._starts = np.cumsum(self.lengths, dtype=np.int64) - self.lengths
        self._bytes = np.frombuffer(b"".join(pieces), np.uint8)
        adds_space = b"".join(pieces[token] for token in tokenizer.encode("a")) == b" a"
        self._dropped = np.array([adds_space and piece.startswith(b" ") for piece in pieces])

    def text(self, ids: NDArray[Any]) -> bytes:
        """The bytes of a document of these ids, at least one."""
        lengths = self.lengths[ids]
        within = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        return self._bytes[np.repeat(self._starts[ids], lengths) + within][int(self._dropped[ids[0]]):].tobytes()

    def sizes(self, ids: NDArray[Any], starts: NDArray[np.int64]) -> NDArray[np.int64]:
        """The bytes of documents that begin at `starts` among the ids, none of which is empty. A space that the
        tokenizer puts in front is no part of them."""
        return np.add.reduceat(self.lengths[ids], starts, dtype=np.int64) - self._dropped[ids[starts]]


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
    names = {token: name for name, token in record["special_tokens"].items()}
    # Runs from before one tokenizer ran everywhere do not have its hash.
    if not path.is_file() or not {record["bos_id"], record["eos_id"]} <= names.keys() or \
            record.get("export_sha256") not in (None, sha256_file(path)):
        raise UserError(f"{path} is missing or not the file that {folder / RECORD} was written for. Run --stage "
                        f"tokenizer --force to make it again.")
    from tokenizers import Tokenizer as Backend
    bounds = names[record["bos_id"]], names[record["eos_id"]]
    return Tokenizer(Backend.from_str(read_bytes(path).decode()), record["kind"], bounds, record["sha256"])


class EncoderError(Exception):
    """The fast encoder cannot open the vocabulary, or failed on a text; the message says why."""


def one_thread() -> None:
    """Limit the libraries written in Rust to one thread in this process: there is a process per core. Call it before
    their first use."""
    os.environ.setdefault("RAYON_NUM_THREADS", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


class FastEncoder(Tokenizer):
    """A finished tokenizer that encodes by fastokens."""

    def __init__(self, reference: Tokenizer, folder: Path) -> None:
        """Open the vocabulary of a finished tokenizer stage; EncoderError if the library refuses it or is absent."""
        vars(self).update(vars(reference))  # it is the same but for `encode_flat`
        if installed_version(NAME) is None:
            raise EncoderError(f"it is several times faster, but not installed ({install(NAME)} installs it)")
        one_thread()
        self._native = _guarded(lambda: _opened(folder / EXPORT))

    def encode_flat(self, texts: Sequence[str]) -> Flat:
        """EncoderError if the library fails, or gives an id outside the vocabulary, BOS or EOS."""
        given = _guarded(lambda: self._native.encode_batch_flat([*texts], False, True))
        ids, offsets = np.frombuffer(given[0], "<u4"), np.frombuffer(given[1], "<u8").astype(np.int64)
        if ((ids >= self.size) | (ids == self.bos_id) | (ids == self.eos_id)).any():
            raise EncoderError("it made BOS, EOS or an id outside the vocabulary of text")
        return ids, offsets


def _opened(path: Path) -> Any:
    """The library's tokenizer without special tokens: their names in a text are text. Other added tokens are still
    matched in texts, as by the reference.

    In the vocabulary they have other names. The library takes a name that is there as one token where characters of it
    are not.
    """
    import fastokens
    description = read_json(path)
    every, model = description.get("added_tokens") or [], description["model"]
    special = {token["content"] for token in every if token.get("special")} - {model.get("unk_token")}
    if isinstance(model["vocab"], dict):  # BPE; the library refuses others
        model["vocab"] = {f"{NO_TEXT}{token}" if name in special else name: token
                          for name, token in model["vocab"].items()}
    added = [token for token in every if not token.get("special")]
    return fastokens.Tokenizer.from_json_str(
        json.dumps({**description, "added_tokens": added, **dict.fromkeys(NOT_TAKEN)}))


def _guarded(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except (KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException as error:  # noqa: BLE001 - a panic in Rust arrives as a class that is not even an Exception
        raise EncoderError(f"{type(error).__name__}: {str(error).strip()[:300]}") from None


ODD = (
    "", *" a\n\t=#-1\u6f22\u0301\U0001f600", "\r\n", "\t ", " \n",
    "  two  spaces  ", "tabs\tand\r\nline ends\r\rhere\n\n\n    indented, trailing \n \n",
    "nul \0 inside\0the\u2028line\u2029ends\x0bof\x0cothers\x85", "\xa0\u3000\u2003\u200b", "\ufeffbom",
    "\u2581 the mark\u2581itself \u2581 \u2581\u2581",
    " !\"#$%&'()*+,-./0123456789:;<=>?@ABCDEFGHIJKLMNOPQRSTUVWXYZ[\\]^_`abcdefghijklmnopqrstuvwxyz{|}~",
    "emoji \U0001f600\U0001f469\u200d\U0001f469\u200d\U0001f467 flags \U0001f1e9\U0001f1ea \u200d\ufe0f",
    "\u6f22\u5b57\u304b\u306a\u4ea4\u3058\u308a\u6587 \u4e2d\u6587\uff0c\u6807\u70b9\u3002 "
    "\ud55c\uad6d\uc5b4 \u1100\u1161\u11a8 \u0627\u0644\u0639\u0631\u0628\u064a\u0629 "
    "\u05e2\u05d1\u05e8\u05d9\u05ea \u0939\u093f\u0928\u094d\u0926\u0940 \u0e44\u0e17\u0e22",
    "combining e\u0301 n\u0303 a\u0300\u0301 \u0301alone \ufb01 \u2460 \xc5 \u212b K \u212a \u017fhe's",
    "<unk> <s> </s> <0x41> <0x0A> <|endoftext|> <|end_of_text| [INST] <mask> QUJD+/9 "
    "#################---------------------------------",
    "1234567 3.14159 0xFF 1_000 \u0661\u0662\u0663\u0664 \u00bd\u00b2 \u2167 don't I'LL we've it\u2019s 's 'S'T")


def odd_strings(tokenizer: Tokenizer) -> Iterator[str]:
    """Strings that encoders get wrong: odd characters, long runs, the names of special and added tokens; and random
    strings of the characters of ODD, blanks, and one block of Unicode, whose code points are spread evenly over the
    powers of two. Always the same ones."""
    yield from ODD
    for piece in ODD:
        for length in (17, 65, 257):
            run = (piece * length)[:length]
            yield f"{run}x\n{run}"
    for name in chain(tokenizer.special_tokens, tokenizer.added.values()):  # of which there may be thousands
        yield f"{name} a{name}b {name[:-1]} {name}{name}\n"
    # More than a quarter of the characters are blanks, and more than a third are of the block.
    common = "".join(ODD) + 40 * " \n\t\r\u2581'0"
    draw = random.Random(0)
    for _ in range(6000):
        block = int(2 ** draw.uniform(0, 20))
        characters = common + "".join(map(chr, range(block, block + 500)))
        yield "".join(draw.choices(characters, k=draw.randint(1, 24))).encode("utf-8", "ignore").decode()
