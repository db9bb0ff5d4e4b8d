"""Strings that encoders get wrong, with which a conversion and the fast encoder are compared."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import chain

from drover.pipeline.tokenization.tokenizer import Tokenizer

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
        for length in (17, 65, 257, *([30_000] if tokenizer.kind == "tiktoken" else [])):  # which cuts the longest
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
