"""Which encoder the stage encode uses: the reference, or a faster one that gives the same ids.

Decoding to the same text proves little, since other ids can do that, too. So the ids themselves are compared: on
validation documents, odd strings and random ones once the tokenizer is made, and on some documents of every shard
(`drover.pipeline.encode`).
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from drover.pipeline.core.errors import UserError, installed_version
from drover.pipeline.core.files import Record
from drover.pipeline.tokenization.base import Tokenizer
from drover.pipeline.tokenization.choosing import beginnings, documents_of, pieces
from drover.pipeline.tokenization.fast import NAME, EncoderError, FastEncoder
from drover.pipeline.tokenization.kinds import load_tokenizer

if TYPE_CHECKING:
    from drover.pipeline.contract.manifest import Manifest
    from drover.pipeline.contract.stage_work import Work

COUNT = "fast_encoder"
"""The key of the result in the counts of the tokenizer stage."""
VALIDATION_BYTES = 4_000_000
"""Bytes of validation text that are compared."""
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


def admitted(work: Work, tokenizer: Path, made: Manifest, shards: Path, validation: Sequence[Record]) -> bool:
    """Whether the fast encoder is used, or the reference. The choice is printed.

    Args:
        tokenizer: folder of the tokenizer stage, `made` its manifest.
        validation: records of validation text shards in `shards`, for a test if that stage did none with these
            packages.

    Raises:
        UserError: encode.encoder asks for the fast one, and it is missing or gives other ids.
    """
    from drover.pipeline.contract.stage_work import software_versions
    wanted, kind, problem = work.config.encode.encoder, made.counts["kind"], ""
    if wanted != "reference":
        found = (made.software == software_versions() and made.counts.get(COUNT)) or verdict(
            tokenizer, shards, validation)
        problem = found["problem"]
        if not problem:
            work.say(f"{NAME} {installed_version(NAME)} encodes: equal ids to {kind} on {found['texts']:,} validation "
                     f"documents and odd strings, and compared again in every shard")
            return True
        if wanted == NAME:
            raise UserError(f"encode.encoder is {NAME}, but {problem}. Set encode.encoder to auto or reference.")
    work.say(f"the reference encodes ({kind}){problem and f'; {problem}'}")
    return False


def verdict(tokenizer: Path, shards: Path, validation: Sequence[Record]) -> Record:
    """Compare the fast encoder with the finished tokenizer in a folder. Returns the number of `texts` with equal ids,
    and the `problem` if a text has other ids or there is no such encoder."""
    reference, texts, problem = load_tokenizer(tokenizer), 0, ""
    documents = (piece for record, limit in beginnings(validation, VALIDATION_BYTES)
                 for document in documents_of(shards, record, limit) for piece in pieces(document.text))
    try:
        encoder = FastEncoder(reference, tokenizer)
        for text in chain(odd_strings(reference), documents):
            ids, own = encoder.encode_flat([text])[0].tolist(), reference.encode(text)
            if ids != own:
                raise EncoderError(f"other ids for {text!r:.80}: {ids!s:.80} instead of {own!s:.80}")
            texts += 1
    except EncoderError as error:
        problem = f"{NAME} cannot be used: {error}"
    return {"texts": texts, "problem": problem}


def odd_strings(reference: Tokenizer) -> Iterator[str]:
    """Strings that encoders get wrong: odd characters, long runs, the names of special and added tokens; and random
    strings of the characters of ODD, blanks, and one block of Unicode, whose code points are spread evenly over the
    powers of two. Always the same ones."""
    yield from ODD
    for piece in ODD:
        for length in (17, 65, 257, 30_000):  # Llama 3's tokenizer cuts the longest
            run = (piece * length)[:length]
            yield f"{run}x\n{run}"
    for name in chain(reference.special_tokens, reference.added.values()):  # of which there may be thousands
        yield f"{name} a{name}b {name[:-1]} {name}{name}\n"
    # More than a quarter of the characters are blanks, and more than a third are of the block.
    common = "".join(ODD) + 40 * " \n\t\r\u2581'0"
    draw = random.Random(0)
    for _ in range(6000):
        block = int(2 ** draw.uniform(0, 20))
        characters = common + "".join(map(chr, range(block, block + 500)))
        yield "".join(draw.choices(characters, k=draw.randint(1, 24))).encode("utf-8", "ignore").decode()
