"""What each preset is: parameters, heads, memory of its KV cache, work per token.

    drover presets
    drover presets llama3.1_8b llama3.2_1b
    drover presets llama3_70b --kv-cache --batch 16 --length 8192 --dtype bf16
    drover presets llama3_8b --budget --peak-tflops 989 --mfu 0.4

A preset without a vocabulary of its own takes the tokenizer's; here it is counted with --vocab-size.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from drover.model.config import ModelConfig
from drover.model.presets import PRESETS, preset
from drover.pipeline.core.command_line import Parser, Program, add_json, refuse_low
from drover.pipeline.core.console import aligned
from drover.pipeline.core.errors import UserError

BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1}
TRAINING_BYTES = 16
"""Of a parameter while it trains under AdamW in mixed precision: weight and gradient in bf16, and in float32 the weight
and both moments."""
CHINCHILLA = 20
"""Tokens a parameter: Hoffmann et al., 2022, table 3, rounded as it is quoted. Llama 3 8B was trained on 1,900."""
COLUMNS = ("preset", "parameters", "blocks", "width", "heads", "KV heads", "head size", "feed-forward", "context",
           "KV cache a token", "at full context", "FLOPs a token", "bf16 weights", "training state")


def add_options(parser: Parser) -> None:
    """The options."""
    parser.add_argument("names", nargs="*", metavar="PRESET", help="only these; without any, all")
    parser.add_argument("--vocab-size", type=int, default=32000, metavar="N",
                        help="for presets that take the tokenizer's (default 32000)")
    parser.add_argument("--kv-cache", action="store_true", help="only the memory of keys and values when generating")
    parser.add_argument("--batch", type=int, default=1, help="sequences at once (default 1)")
    parser.add_argument("--length", type=int, metavar="TOKENS", help="of each sequence; default: the full context")
    parser.add_argument("--dtype", choices=BYTES, default="bf16", help="of keys and values (default bf16)")
    parser.add_argument("--budget", action="store_true", help="only what training costs, and what the weights take")
    parser.add_argument("--tokens-per-parameter", type=float, default=CHINCHILLA, metavar="N",
                        help=f"of --budget (default {CHINCHILLA}: where a given number of FLOPs teaches most)")
    parser.add_argument("--peak-tflops", type=float, default=989.0, metavar="N",
                        help="of one GPU in the precision of training (default 989: an H100 in dense bf16)")
    parser.add_argument("--mfu", type=float, default=0.4, metavar="SHARE", help="of that peak (default 0.4)")
    add_json(parser)


def work(options: argparse.Namespace) -> None:
    """Print what is asked for."""
    refuse_low(options, "vocab_size", "batch", "length", "tokens_per_parameter", "peak_tflops", "mfu")
    try:
        shapes = {name: known_vocabulary(preset(name), options.vocab_size) for name in options.names or PRESETS}
    except ValueError as error:
        raise UserError(str(error)) from None
    if options.json:
        print(json.dumps([as_json(name, shape, options) for name, shape in shapes.items()], indent=1))
        return
    if options.kv_cache or options.budget:
        for name, shape in shapes.items():
            print((kv_cache if options.kv_cache else budget)(name, shape, options))
        return
    print("\n".join(aligned([COLUMNS, *(row(name, shape) for name, shape in shapes.items())], str.rjust)))
    print(f"\nKV cache in bf16. FLOPs to train on a token at full context, attention counted whole. Training state: "
          f"{TRAINING_BYTES} bytes\na parameter (AdamW, bf16 with float32 masters). Presets without a vocabulary of "
          f"their own: {options.vocab_size:,}.")


def known_vocabulary(shape: ModelConfig, vocab_size: int) -> ModelConfig:
    """The shape, with that vocabulary if it has none of its own."""
    return shape if shape.vocab_size else shape.model_copy(update={"vocab_size": vocab_size})


def as_json(name: str, shape: ModelConfig, options: argparse.Namespace) -> dict[str, Any]:
    """A preset for programs: its settings, the cache of keys and values, and what training costs."""
    tokens, flops, hours = cost(shape, options)
    return {"preset": name, "parameters": shape.parameter_count, "kv_cache_bytes": cache_bytes(shape, options),
            "tokens": tokens, "flops": flops, "gpu_hours": hours, **shape.model_dump(mode="json")}


def row(name: str, shape: ModelConfig) -> tuple[str, ...]:
    """A preset's line of the table."""
    context = shape.context_length
    return (name, f"{shape.parameter_count:,}", str(shape.layers), f"{shape.dim:,}", str(shape.heads),
            str(shape.kv_heads), str(shape.head_width), f"{shape.hidden:,}", f"{context:,}",
            f"{shape.kv_cache_bytes(1, 1, 2):,} B", binary(shape.kv_cache_bytes(1, context, 2)),
            f"{shape.flops_per_token(context, causal=False):.3e}", decimal(2 * shape.parameter_count),
            decimal(TRAINING_BYTES * shape.parameter_count))


def cache_bytes(shape: ModelConfig, options: argparse.Namespace) -> int:
    """What keys and values of a batch take."""
    return shape.kv_cache_bytes(options.batch, options.length or shape.context_length, BYTES[options.dtype])


def kv_cache(name: str, shape: ModelConfig, options: argparse.Namespace) -> str:
    """What keys and values of a batch take, and how it comes about."""
    size, length = cache_bytes(shape, options), options.length or shape.context_length
    beyond = f"; the context is {shape.context_length:,}" if length > shape.context_length else ""
    return (f"{name}: {size:,} bytes ({binary(size)}) = 2 (keys, values) x {shape.layers} blocks x {options.batch} x "
            f"{length:,} tokens x {shape.kv_heads} KV heads x {shape.head_width} x {BYTES[options.dtype]} "
            f"bytes{beyond}")


def cost(shape: ModelConfig, options: argparse.Namespace) -> tuple[float, float, float]:
    """Training by the rule 6 x parameters x tokens: tokens, FLOPs, GPU-hours."""
    tokens = options.tokens_per_parameter * shape.parameter_count
    flops = 6 * shape.parameter_count * tokens
    return tokens, flops, flops / (options.peak_tflops * 1e12 * options.mfu) / 3600


def budget(name: str, shape: ModelConfig, options: argparse.Namespace) -> str:
    """What training a preset costs, and what its weights take."""
    tokens, flops, hours = cost(shape, options)
    sizes = ", ".join(f"{decimal(shape.parameter_count * bits // 8)} in {bits} bits" for bits in (16, 8, 4))
    return (f"{name}: {tokens:.4g} tokens ({options.tokens_per_parameter:g} a parameter), {flops:.4g} FLOPs (6 x "
            f"parameters x tokens), {hours:,.1f} GPU-hours at {options.mfu:.0%} of {options.peak_tflops:g} TFLOP/s; "
            f"weights {sizes}")


def binary(size: int) -> str:
    """Bytes as memory is counted, in KiB, MiB or GiB."""
    unit, name = next((unit, name) for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))
                      if size >= unit or name == "KiB")
    return f"{size / unit:,.3f} {name}"


def decimal(size: int) -> str:
    """Bytes as disks and weights are counted, in MB or GB."""
    return f"{size / 1e9:,.2f} GB" if size >= 1e9 else f"{size / 1e6:,.1f} MB"


main = Program("python -m drover.tools.presets", __doc__, add_options, work, mixed=True)

if __name__ == "__main__":
    sys.exit(main())
