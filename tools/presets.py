"""Show the presets: parameters, heads, memory of the KV cache, FLOPs per token.

    drover presets
    drover presets llama3.1_8b llama3.2_1b
    drover presets llama3_70b --kv-cache --batch 16 --length 8192 --dtype bf16
    drover presets llama3_8b --budget

A preset without a vocabulary of its own takes the tokenizer's; here it is counted with --vocab-size.
"""

from __future__ import annotations

import argparse
import json
import sys

from drover.model.config import ModelConfig
from drover.model.presets import PRESETS, preset
from drover.pipeline.core.command_line import Parser, Program, add_json, refuse_low
from drover.pipeline.core.console import aligned, echo
from drover.pipeline.core.errors import UserError
from drover.pipeline.core.files import Record

BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1}
TRAINING_BYTES = 16
"""Bytes per parameter in mixed-precision training with AdamW: weight and gradient in bf16; weight and two optimizer
states in float32."""
CHINCHILLA = 20
"""Tokens a parameter: Hoffmann et al., 2022, table 3, rounded as it is quoted. Llama 3 8B was trained on 1,900."""
TABLE = {"preset": "{preset}", "parameters": "{parameters:,}", "blocks": "{layers}", "width": "{dim:,}",
         "heads": "{heads}", "KV heads": "{kv_heads}", "head size": "{head_width}", "feed-forward": "{hidden:,}",
         "context": "{context_length:,}", "KV cache a token": "{cache_of_token:,} B",
         "at full context": "{cache_of_context:,.3f} GiB", "FLOPs a token": "{flops_per_token:.3e}",
         "bf16 weights": "{gb_in_16_bits:,.2f} GB", "training state": "{training_gb:,.2f} GB"}
KV_CACHE = {"preset": "{preset}", "context": "{context_length:,}", "sequences": "{batch:,}", "of tokens": "{length:,}",
            "blocks": "{layers}", "KV heads": "{kv_heads}", "head size": "{head_width}",
            "KV cache": "{kv_cache_bytes:,} B", "": "{kv_cache_gib:,.3f} GiB"}
BUDGET = {"preset": "{preset}", "parameters": "{parameters:,}", "sequences of": "{sequence_length:,}",
          "tokens": "{tokens:.4g}", "FLOPs": "{flops:.4g}",
          "weights in 16 bits": "{gb_in_16_bits:,.2f} GB",
          "in 8 bits": "{gb_in_8_bits:,.2f} GB", "in 4 bits": "{gb_in_4_bits:,.2f} GB"}
"""Columns: how the figures of `facts` are written."""


def add_options(parser: Parser) -> None:
    """The options."""
    parser.add_argument("names", nargs="*", metavar="PRESET", help="only these; without any, all")
    parser.add_argument("--vocab-size", type=int, default=32000, metavar="N",
                        help="for presets that take the tokenizer's (default 32000)")
    parser.add_argument("--kv-cache", action="store_true", help="only the memory of keys and values when generating")
    parser.add_argument("--batch", type=int, default=1, help="sequences at once (default 1)")
    parser.add_argument("--length", type=int, metavar="TOKENS", help="of each sequence; default: the full "
                        "context, and for --budget the context before an extension")
    parser.add_argument("--dtype", choices=BYTES, default="bf16", help="of keys and values (default bf16)")
    parser.add_argument("--budget", action="store_true", help="only what training costs, and what the weights take")
    parser.add_argument("--tokens-per-parameter", type=float, default=CHINCHILLA, metavar="N",
                        help=f"of --budget (default {CHINCHILLA}: where a given number of FLOPs teaches most)")
    add_json(parser)


def work(options: argparse.Namespace) -> None:
    """Print a table."""
    refuse_low(options, "vocab_size", "batch", "length", "tokens_per_parameter")
    try:
        shapes = {name: preset(name).with_vocabulary(options.vocab_size) for name in options.names or PRESETS}
    except ValueError as error:
        raise UserError(str(error)) from None
    result = [facts(name, shape, options) for name, shape in shapes.items()]
    if options.json:
        print(json.dumps(result, indent=1))
        return
    if options.kv_cache:
        columns = KV_CACHE
        note = (f"2 (keys and values) x sequences x tokens x blocks x KV heads x head size x {BYTES[options.dtype]} "
                f"bytes.")
    elif options.budget:
        columns = BUDGET
        note = (f"{options.tokens_per_parameter:g} tokens a parameter, FLOPs as training counts them (matrix products "
                f"and, whole, attention).")
    else:
        columns = TABLE
        note = (f"KV cache in bf16. FLOPs to train on a token at full context, attention counted whole. Training "
                f"state: {TRAINING_BYTES} bytes\na parameter (AdamW, bf16 with float32 masters). Presets without a "
                f"vocabulary of their own: {options.vocab_size:,}.")
    rows = [[form.format(**one) for form in columns.values()] for one in result]
    echo("\n".join([*aligned([[*columns], *rows], str.rjust), "", note]))


def facts(name: str, shape: ModelConfig, options: argparse.Namespace) -> Record:
    """A preset's settings, the caches of keys and values, and what training costs, counted as training counts."""
    parameters, context, length = shape.parameter_count, shape.context_length, options.length or shape.context_length
    cache = shape.kv_cache_bytes(options.batch, length, BYTES[options.dtype])
    tokens = options.tokens_per_parameter * parameters
    scaling = shape.rope_scaling
    trained = options.length or (context if scaling is None else scaling.original_context_length)
    flops = tokens * shape.flops_per_token(trained, causal=False)
    return {**shape.model_dump(mode="json"), "preset": name, "parameters": parameters, "batch": options.batch,
            "length": length, "hidden": shape.hidden, "head_width": shape.head_width, "kv_cache_bytes": cache,
            "kv_cache_gib": cache / 2**30, "cache_of_token": shape.kv_cache_bytes(1, 1, 2),
            "cache_of_context": shape.kv_cache_bytes(1, context, 2) / 2**30,
            "flops_per_token": shape.flops_per_token(context, causal=False), "tokens": tokens, "flops": flops,
            "sequence_length": trained,
            "training_gb": TRAINING_BYTES * parameters / 1e9,
            **{f"gb_in_{bits}_bits": parameters * bits / 8e9 for bits in (16, 8, 4)}}


main = Program("python -m drover.tools.presets", __doc__, add_options, work, mixed=True)

if __name__ == "__main__":
    sys.exit(main())
