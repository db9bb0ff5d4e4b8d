"""Show the presets: parameters, heads, memory of the KV cache, FLOPs per token.

    drover presets
    drover presets llama3.1_8b llama3.2_1b
    drover presets llama3_8b --budget

A preset without a vocabulary of its own takes the tokenizer's; here it is counted with 32,000 ids.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from drover.model.config import ModelConfig
from drover.model.presets import PRESETS, preset
from drover.pipeline.config.loading import shipped
from drover.pipeline.core.console import Parser, Program, add_json, draw, refuse_low, table
from drover.pipeline.core.errors import UserError, all_problems

TRAINING_BYTES = 16
"""Bytes per parameter in mixed-precision training with AdamW: weight and gradient in bf16; weight and two optimizer
states in float32."""
CHINCHILLA = 20
"""Tokens a parameter: Hoffmann et al., 2022, table 3, rounded as it is quoted. Llama 3 8B was trained on 1,900."""
VOCABULARY = 32000
"""Ids, for presets that take the tokenizer's."""
TABLES = (
    {"parameters": "{parameters:,}", "blocks": "{layers}", "width": "{dim:,}", "heads": "{heads}",
     "KV heads": "{kv_heads}", "feed-forward": "{hidden:,}"},
    {"head size": "{head_width}", "context": "{context_length:,}", "KV cache a token": "{cache_of_token:,} B",
     "at full context": "{cache_of_context:,.3f} GiB"},
    {"FLOPs a token": "{flops_per_token:.3e}", "bf16 weights": "{gb_in_16_bits:,.2f} GB",
     "training state": "{training_gb:,.2f} GB"})
BUDGETS = (
    {"parameters": "{parameters:,}", "sequences of": "{sequence_length:,}", "tokens": "{tokens:.4g}",
     "FLOPs": "{flops:.4g}"},
    {"weights in 16 bits": "{gb_in_16_bits:,.2f} GB", "in 8 bits": "{gb_in_8_bits:,.2f} GB",
     "in 4 bits": "{gb_in_4_bits:,.2f} GB"})
"""Columns of each table: how the figures of `facts` are written. A terminal of 80 columns has room for a table."""


def add_options(parser: Parser) -> None:
    """The options."""
    parser.add_argument("names", nargs="*", metavar="PRESET", help="only these; without any, all")
    parser.add_argument("--length", type=int, metavar="TOKENS", help="of a sequence, for --budget; default: the "
                        "context before an extension")
    parser.add_argument("--budget", action="store_true", help="only what training costs, and what the weights take")
    add_json(parser)


def work(options: argparse.Namespace) -> None:
    """Print a table."""
    refuse_low(options, "length")
    problems = list[str]()
    shapes = dict[str, ModelConfig]()
    for name in options.names or PRESETS:
        try:
            shapes[name] = preset(name).with_vocabulary(VOCABULARY)
        except ValueError as error:
            file = Path(f"configs/{name}.yaml")
            problems.append(f"{error}{f' {file} is a configuration, for `drover run`.' * shipped(file).is_file()}")
    if problems:
        raise UserError(all_problems(problems, "Some names are of no preset"))
    result = [facts(name, shape, options.length) for name, shape in shapes.items()]
    if options.json:
        print(json.dumps(result, indent=1))
        return
    note = (f"{CHINCHILLA} tokens a parameter, FLOPs as training counts them\n(matrix products and, whole, attention)."
            if options.budget else
            f"KV cache in bf16. FLOPs to train on a token at full context, attention whole.\nTraining state: "
            f"{TRAINING_BYTES} bytes a parameter (AdamW, bf16 with float32 masters).\nPresets without a vocabulary of "
            f"their own: {VOCABULARY:,}.")
    for columns in BUDGETS if options.budget else TABLES:
        rows = [[one["preset"], *(form.format(**one) for form in columns.values())] for one in result]
        draw(table([["preset", *columns], *rows], columns), "")
    draw(note)


def facts(name: str, shape: ModelConfig, length: int | None) -> dict[str, Any]:
    """A preset's settings, the caches of keys and values in bf16, and what training costs, counted as training counts.
    length: of the training's sequences."""
    parameters, context = shape.parameter_count, shape.context_length
    trained = length or (context if shape.rope_scaling is None else shape.rope_scaling.original_context_length)
    tokens = CHINCHILLA * parameters
    return {**shape.model_dump(mode="json"), "preset": name, "parameters": parameters, "hidden": shape.hidden,
            "head_width": shape.head_width, "cache_of_token": shape.kv_cache_bytes(1, 1, 2),
            "cache_of_context": shape.kv_cache_bytes(1, context, 2) / 2**30,
            "flops_per_token": shape.flops_per_token(context, causal=False), "tokens": tokens,
            "flops": tokens * shape.flops_per_token(trained, causal=False), "sequence_length": trained,
            "training_gb": TRAINING_BYTES * parameters / 1e9,
            **{f"gb_in_{bits}_bits": parameters * bits / 8e9 for bits in (16, 8, 4)}}


main = Program("python -m drover.tools.presets", __doc__, add_options, work, mixed=True)

if __name__ == "__main__":
    sys.exit(main())
