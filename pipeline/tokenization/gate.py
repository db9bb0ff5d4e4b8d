"""Which encoder the stage encode uses: the reference, or a faster one that gives the same ids.

Decoding to the same text proves little, since other ids can do that, too. So the ids themselves are compared: on
validation documents, odd strings and random ones once the tokenizer is made, and on some documents of every shard
(`drover.pipeline.encode`).
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from drover.pipeline.core.errors import UserError, installed_version
from drover.pipeline.tokenization.base import Tokenizer
from drover.pipeline.tokenization.choosing import beginnings, documents_of
from drover.pipeline.tokenization.fast import NAME, EncoderError, FastEncoder
from drover.pipeline.tokenization.kinds import load_tokenizer

if TYPE_CHECKING:
    from drover.pipeline.contract.stage_work import Work

COUNT = "fast_encoder"
"""The key of the result in the counts of the tokenizer stage."""
FUZZ_STRINGS = 6000
RUN_CHARACTERS = (17, 65, 257, 30_000)
"""Lengths of the runs of one kind of character; Llama 3's tokenizer cuts the longest."""
VALIDATION_BYTES = 4_000_000
"""Bytes of validation text that are compared."""
ODD = (
    "", " ", "a", "  two  spaces  ", "tabs\tand\r\nline ends\r\rhere\n\n\n    indented", "nul \0 inside\0",
    "the\u2028line\u2029ends\x0bof\x0cothers\x85", "\ufeffbom", "\u2581 the mark\u2581itself \u2581 \u2581\u2581",
    "emoji \U0001f600\U0001f469\u200d\U0001f469\u200d\U0001f467 flags \U0001f1e9\U0001f1ea \u200d\ufe0f",
    "\u6f22\u5b57\u304b\u306a\u4ea4\u3058\u308a\u6587 \u4e2d\u6587\uff0c\u6807\u70b9\u3002 "
    "\ud55c\uad6d\uc5b4 \u1100\u1161\u11a8",
    "combining e\u0301 n\u0303 a\u0300\u0301 \u0301alone", "\ufb01 \u2460 \xc5 \u212b K \u212a \u017fhe's",
    "<unk> <s> </s> <0x41> <0x0A>", "1234567 3.14159 0xFF 1_000 \u0661\u0662\u0663\u0664 \u00bd\u00b2 \u2167",
    "don't I'LL we've it\u2019s 's 'S'T", "#" * 17 + "-" * 33, "\u0627\u0644\u0639\u0631\u0628\u064a\u0629 "
    "\u05e2\u05d1\u05e8\u05d9\u05ea \u0939\u093f\u0928\u094d\u0926\u0940 \u0e44\u0e17\u0e22", "\xa0\u3000\u2003\u200b",
    "trailing \n \n", "\r\n" * 20, "x" * 257 + "\n" + "\t" * 65)
RUNS = (" ", "\n", "\r\n", "\t", "a", "\t ", "=", "#", "-", "\u6f22", "QUJD+/9", "\u0301", "1", " \n",
        "\U0001f600", "word ")
BLANKS = 9 * " \n\t\r\u2581'0"
"""Repeated, so that about a quarter of the characters of a random string are of these."""


def admitted(work: Work, tokenizer: Path, counts: dict[str, Any], shards: Path, validation: Sequence[dict[str, Any]],
             ) -> str | None:
    """The version of the fast encoder if it is used; None if the reference is. The choice is printed.

    Args:
        tokenizer: folder of the tokenizer stage, `counts` those of its manifest.
        validation: records of validation text shards in `shards`, for a test if that stage has none of this version.

    Raises:
        UserError: encode.encoder asks for the fast one, and it is missing or gives other ids.
    """
    wanted, kind, problem = work.config.encode.encoder, counts["kind"], ""
    if wanted != "reference":
        found = counts.get(COUNT, {})
        if found.get("versions") != _versions():
            found = verdict(tokenizer, shards, validation)
        version, problem = found["versions"][NAME], found["problem"]
        if not problem:
            work.say(f"{NAME} {version} encodes: equal ids to {kind} on {found['texts']:,} validation documents and "
                     f"odd strings, and compared again in every shard")
            return str(version)
        if wanted == NAME:
            raise UserError(f"encode.encoder is {NAME}, but {problem}. Set encode.encoder to auto or reference.")
    work.say(f"the reference encodes ({kind}){problem and f'; {problem}'}")
    return None


def verdict(tokenizer: Path, shards: Path, validation: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Compare the fast encoder with the finished tokenizer in a folder. Returns `versions` of all libraries, the number
    of `texts` with equal ids, and the `problem` if a text has other ids or there is no such encoder."""
    reference, texts, problem = load_tokenizer(tokenizer), 0, ""
    try:
        encoder = FastEncoder(reference, tokenizer)
        compared = [*odd_strings(reference), *(document.text for record, limit in beginnings(validation, VALIDATION_BYTES)
                                               for document in documents_of(shards, record, limit))]
        refuse_other_ids(encoder, reference, compared)
        texts = len(compared)
    except EncoderError as error:
        problem = f"{NAME} cannot be used: {error}"
    return {"versions": _versions(), "texts": texts, "problem": problem}


def _versions() -> dict[str, str | None]:
    return {package: installed_version(package) for package in (NAME, "sentencepiece", "tiktoken", "tokenizers")}


def refuse_other_ids(encoder: FastEncoder, reference: Tokenizer, texts: Sequence[str]) -> None:
    """EncoderError if the fast encoder gives other ids than the reference for a text."""
    for text in texts:
        ids, own = encoder.encode_flat([text])[0].tolist(), reference.encode(text)
        if ids != own:
            raise EncoderError(f"other ids for {text!r:.80}: {ids!s:.80} instead of {own!s:.80}")


def odd_strings(reference: Tokenizer) -> Iterator[str]:
    """Strings that encoders get wrong: odd characters, long runs, the names of special tokens; and random strings of
    ASCII, blanks and one block of Unicode, whose code points are spread evenly over the powers of two. Always the same
    ones."""
    yield from ODD
    for piece, length in product(RUNS, RUN_CHARACTERS):
        yield (piece * length)[:length] + "x"
    for name in (*reference.special_tokens, *reference.added.values(), "<|endoftext|>", "[INST]", "<mask>"):
        yield f"{name} a{name}b {name[:-1]} {name}{name}\n"
    draw = random.Random(0)
    for _ in range(FUZZ_STRINGS):
        block = int(2 ** draw.uniform(0, 20))
        characters = BLANKS + "".join(map(chr, (*range(32, 127), *range(block, block + 95))))
        yield "".join(draw.choices(characters, k=draw.randint(1, 24))).encode("utf-8", "ignore").decode()
