"""Which encoder works in the stage encode: the reference, or a faster one that gives the same ids.

That ids decode to the text proves little: other ids do so too. So the ids themselves are compared: on held-out
documents, on odd strings and on fuzz once the tokenizer is made, and on some documents of every shard
(`drover.pipeline.encode`).
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from importlib import metadata
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from drover.pipeline.core.errors import UserError, install
from drover.pipeline.data.text_shards import read_shard
from drover.pipeline.tokenization.base import Tokenizer
from drover.pipeline.tokenization.fast import KINDS, NAME, EncoderError, FastEncoder, installed_version
from drover.pipeline.tokenization.kinds import load_tokenizer

if TYPE_CHECKING:
    from drover.pipeline.contract.stage_work import Work

COUNT = "fast_encoder"
"""Where the counts of the tokenizer stage have its verdict."""
FUZZ_STRINGS = 6000
RUN_CHARACTERS = 30_000
"""Length of the runs of one kind of character; beyond it Llama 3's tokenizer cuts."""
DOCUMENT_BYTES = 4_000_000
"""Held-out text that is compared."""
MOST_SHARDS = 64
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
RANGES = ((0x20, 0x7F), (0x20, 0x7F), (0, 0x300), (0x300, 0x370), (0x370, 0x2000), (0x2000, 0x2070), (0x2070, 0x3100),
          (0x3100, 0xD800), (0xE000, 0x10000), (0x1F000, 0x1FB00), (0x10000, 0x110000))
"""Code points of fuzz: all of Unicode but surrogates."""
BLANKS = " \n\t\r\u2581'0"


def admitted(work: Work, tokenizer: Path, counts: dict[str, Any], shards: Path, heldout: Sequence[dict[str, Any]],
             ) -> str | None:
    """The version of the fast encoder, if it is to encode; None where the reference does. What it is, is said.

    Args:
        tokenizer: folder of the tokenizer stage, `counts` those of its manifest.
        heldout: records of held-out text shards in `shards`, for a verdict where that stage has none of this version.

    Raises:
        UserError: encode.encoder asks for the fast one, and it is not there or gives other ids.
    """
    wanted, kind, version, problem = work.config.encode.encoder, counts["kind"], installed_version(), ""
    if kind not in KINDS:
        problem = f"{NAME} knows no vocabularies of tokenizer.kind {kind}"
    elif version is None:
        problem = f"{NAME} is several times faster, and not installed ({install(NAME)} installs it)"
    elif wanted != "reference":
        found = counts.get(COUNT, {})
        if found.get("versions") != _versions(kind):
            found = verdict(tokenizer, shards, heldout)
        if not found["problem"]:
            work.say(f"{NAME} {version} encodes: equal ids to {kind} on {found['texts']:,} held-out documents and odd "
                     f"strings, and compared again in every shard")
            return version
        problem = f"{NAME} {version} does not give this vocabulary's ids ({found['problem']})"
    if wanted == NAME:
        raise UserError(f"encode.encoder is {NAME}, but {problem}. Set encode.encoder to auto or reference.")
    work.say(f"the reference encodes ({kind})" + (f"; {problem}" if problem and wanted == "auto" else ""))
    return None


def verdict(tokenizer: Path, shards: Path, heldout: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Compare the fast encoder with the finished tokenizer in a folder: `versions` of both, how many `texts` have equal
    ids, and the `problem` where one has not."""
    reference = load_tokenizer(tokenizer)
    found = {"versions": _versions(reference.kind), "texts": 0, "problem": ""}
    try:
        found["texts"] = compared(FastEncoder(reference, tokenizer), reference, chain(
            odd_strings(reference), fuzz(FUZZ_STRINGS), heldout_texts(shards, heldout)))
    except EncoderError as error:
        found["problem"] = str(error)
    return found


def _versions(kind: str) -> list[str | None]:
    return [installed_version(), metadata.version({"huggingface": "tokenizers"}.get(kind, kind))]


def compared(encoder: FastEncoder, reference: Tokenizer, texts: Iterable[str]) -> int:
    """How many texts the fast encoder gives the reference's ids for. EncoderError naming the first with others."""
    count = 0
    for text in texts:
        ids, own = encoder.encode_flat([text])[0], np.array(reference.encode(text), np.uint32)
        if not np.array_equal(ids, own):
            raise EncoderError(f"other ids for {text!r:.80}: {ids.tolist()!s:.80} instead of {own.tolist()!s:.80}")
        count += 1
    return count


def heldout_texts(shards: Path, records: Sequence[dict[str, Any]]) -> Iterator[str]:
    """About DOCUMENT_BYTES of held-out text: the beginnings of at most MOST_SHARDS shards."""
    chosen = records[::-(-len(records) // MOST_SHARDS)] if records else []
    for record in chosen:
        left = DOCUMENT_BYTES // len(chosen)
        for document in read_shard(shards, record):
            left -= len(document.text.encode())
            yield document.text
            if left <= 0:
                break


def odd_strings(reference: Tokenizer) -> Iterator[str]:
    """What encoders get wrong: odd characters, long runs, the names of special tokens."""
    yield from ODD
    for piece in (" ", "\n", "a", "\t ", "ab", "=", "\u6f22", "QUJD+/9", "\u0301", "1", " \n", "\U0001f600"):
        yield (piece * RUN_CHARACTERS)[:RUN_CHARACTERS] + "x"
    names = [*reference.special_tokens, *reference.added.values(), "<|endoftext|>", "<|im_start|>", "[INST]", "<mask>"]
    for name in names:
        yield from (name, f"a{name}b", f" {name} {name[:-1]}", f"{name}{name}\n")
    yield from ("".join(names), "word " * (RUN_CHARACTERS // 4))


def fuzz(count: int) -> Iterator[str]:
    """Strings over all of Unicode but surrogates, each of two ranges of it and blanks; the same ones everywhere."""
    draw = random.Random(0)
    for _ in range(count):
        ranges = draw.choices(RANGES, k=2)
        yield "".join(draw.choice(BLANKS) if draw.random() < 0.2 else chr(draw.randrange(*draw.choice(ranges)))
                      for _ in range(draw.randint(1, 24)))
