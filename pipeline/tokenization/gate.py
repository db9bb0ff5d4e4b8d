"""Whether a faster encoder gives the ids of the reference: on documents, on odd strings, on fuzz.

That ids decode to the text proves little: others do so too. Here the ids themselves are compared.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.files import sha256_file
from pipeline.tokenization.base import Tokenizer, joined
from pipeline.tokenization.fast import KINDS, NAME, EncoderError, FastEncoder, defining_file, installed_version

FORMAT = 1
"""Raised when the gate asks for more than before: older verdicts then do not count."""
FUZZ_STRINGS = 6000
RUN_CHARACTERS = 30_000
"""Length of the runs of one kind of character; beyond it Llama 3's tokenizer cuts."""
BATCH_BYTES = 1 << 20
REFERENCES = {"sentencepiece": "sentencepiece", "tiktoken": "tiktoken", "huggingface": "tokenizers"}
ODD = (
    "", " ", "\n", "\t\t\n", "a", "  two  spaces  ", "tabs\tand\r\nline ends\r\rhere\n\n\n    indented",
    "\u2028\u2029\x85", "a\u2028b\u2029c\x0bd\x0ce", "nul \0 inside\0", "\0", "\x00\x01\x7f\x80", "\ufeffbom", "\ufeff",
    "\u2581 the mark\u2581itself", "\u2581", " \u2581 \u2581\u2581", "emoji \U0001f600\U0001f469\u200d\U0001f469\u200d"
    "\U0001f467 flags \U0001f1e9\U0001f1ea", "\u200d\ufe0f", "\u6f22\u5b57\u304b\u306a\u4ea4\u3058\u308a\u6587 "
    "\u4e2d\u6587\uff0c\u6807\u70b9\u3002", "combining e\u0301 n\u0303 a\u0300\u0301 \u0301alone",
    "\ufb01 \u2460 \xc5 \u212b K \u212a \u017fhe's", "<unk> <s> </s> <0x41> <0x0A>", "1234567 3.14159 0xFF 1_000",
    "\u0661\u0662\u0663\u0664 \u00bd\u00b2 \u2167", "don't I'LL we've it\u2019s 's 'S'T",
    "\U0010ffff\ue000\ufffd\ufffe",
    "=" * 300, " " * 300 + "x", "#" * 17 + "-" * 33, "\u0627\u0644\u0639\u0631\u0628\u064a\u0629 "
    "\u05e2\u05d1\u05e8\u05d9\u05ea \u0939\u093f\u0928\u094d\u0926\u0940 \u0e44\u0e17\u0e22", "\xa0\u3000\u2003\u200b",
    "\u1100\u1161\u11a8 \ud55c\uad6d\uc5b4", "trailing \n \n", "\r", "\r\n" * 20, "x" * 257 + "\n" + "\t" * 65,
)


def key_of(folder: Path, kind: str, sha256: str) -> dict[str, Any]:
    """What a verdict on a vocabulary holds for: the encoder, the reference and the files that both read."""
    from importlib import metadata

    return {"format": FORMAT, "encoder": NAME, "version": installed_version(), "reference": REFERENCES[kind],
            "reference_version": metadata.version(REFERENCES[kind]), "tokenizer_sha256": sha256,
            "source_sha256": sha256_file(defining_file(folder, kind))}


def applies(kind: str) -> bool:
    """Whether there is anything to ask: the library is installed and may know such a vocabulary."""
    return kind in KINDS and installed_version() is not None


def verdict(folder: Path, reference: Tokenizer, documents: Iterable[str]) -> dict[str, Any]:
    """Compare the encoder with the reference over texts; a JSON record of what was found.

    Args:
        folder: the tokenizer stage's.
        documents: texts of the corpus.

    Returns:
        `key_of`, `equal`, what was compared (documents, text_bytes, strings) and, where it is not equal, `problem`.
    """
    found = {**key_of(folder, reference.kind, reference.sha256), "equal": False, "documents": 0, "text_bytes": 0,
             "strings": 0}
    try:
        encoder = FastEncoder(reference, folder)
        for batch in _batched(chain(odd_strings(reference), fuzz(0, FUZZ_STRINGS))):
            compare(encoder, reference, batch)
            found["strings"] += len(batch)
        for batch in _batched(documents):
            compare(encoder, reference, batch)
            found["documents"] += len(batch)
            found["text_bytes"] += sum(len(text.encode()) for text in batch)
    except EncoderError as error:
        return {**found, "problem": str(error)}
    return {**found, "equal": True}


def compare(encoder: FastEncoder, reference: Tokenizer, texts: Sequence[str]) -> None:
    """EncoderError naming the first text of which the encoder gives other ids."""
    wanted, offsets = joined([np.array(reference.encode(text), np.uint32) for text in texts])
    ids, found = encoder.encode_flat(texts)
    if np.array_equal(offsets, found) and np.array_equal(wanted, ids):
        return
    for number, text in enumerate(texts):
        theirs, own = ids[found[number]:found[number + 1]], wanted[offsets[number]:offsets[number + 1]]
        if not np.array_equal(theirs, own):
            raise EncoderError(f"other ids for {_shown(text)}: {_shown(theirs.tolist())} instead of "
                               f"{_shown(own.tolist())}")


def odd_strings(reference: Tokenizer) -> Iterator[str]:
    """What encoders get wrong: odd characters, long runs, the names of special tokens."""
    yield from ODD
    for piece in (" ", "\n", "a", "\t ", "ab", "=", "\u6f22", "QUJD+/9", "\u0301", "1", " \n", "\U0001f600"):
        yield (piece * RUN_CHARACTERS)[:RUN_CHARACTERS] + "x"
    names = [*reference.special_tokens, *reference.added.values(), "<|endoftext|>", "<|im_start|>", "[INST]", "<mask>"]
    for name in names:
        yield from (name, f"a{name}b", f" {name} {name[:-1]}", f"{name}{name}\n")
    yield from ("".join(names), "word " * (RUN_CHARACTERS // 4))


def fuzz(seed: int, count: int) -> Iterator[str]:
    """Strings over all of Unicode but surrogates; a seed gives the same ones everywhere."""
    draw = random.Random(seed)
    ranges = ((0x20, 0x7F), (0x20, 0x7F), (0, 0x300), (0x300, 0x370), (0x370, 0x2000), (0x2000, 0x2070),
              (0x2070, 0x3100), (0x3100, 0xD800), (0xE000, 0x10000), (0x1F000, 0x1FB00), (0x10000, 0x110000))
    blanks = " \n\t\r\u2581'0"
    for _ in range(count):
        chosen = [ranges[int(draw.random() * len(ranges))] for _ in range(2)]
        characters = []
        for _ in range(1 + int(draw.random() * 24)):
            kind = draw.random()
            low, high = chosen[kind < 0.4]
            characters.append(blanks[int(kind * 10 * len(blanks)) % len(blanks)] if kind > 0.8
                              else chr(low + int(draw.random() * (high - low))))
        yield "".join(characters)


def _batched(texts: Iterable[str]) -> Iterator[list[str]]:
    batch: list[str] = []
    size = 0
    for text in texts:
        batch.append(text)
        size += len(text)
        if size >= BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
