"""What each preset is: parameters, heads, memory of its KV cache, work per token.

    python -m tools.presets
    python -m tools.presets llama3.1_8b llama3.2_1b
    python -m tools.presets llama3_70b --kv-cache --batch 16 --length 8192 --dtype bf16

A preset without a vocabulary of its own takes the tokenizer's; here it is counted with --vocab-size.
"""

from __future__ import annotations

import argparse
import sys

from model.config import ModelConfig
from model.presets import PRESETS, preset

BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1}
TRAINING_BYTES = 16
"""Of a parameter while it trains under AdamW in mixed precision: weight and gradient in bf16, and in float32 the weight
and both moments."""
COLUMNS = ("preset", "parameters", "blocks", "width", "heads", "KV heads", "head size", "feed-forward", "context",
           "KV cache a token", "at full context", "FLOPs a token", "bf16 weights", "training state")


def main(arguments: list[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tools.presets", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="PRESET", help="only these; without any, all")
    parser.add_argument("--vocab-size", type=int, default=32000, metavar="N",
                        help="for presets that take the tokenizer's (default 32000)")
    parser.add_argument("--kv-cache", action="store_true", help="only the memory of keys and values when generating")
    parser.add_argument("--batch", type=int, default=1, help="sequences at once (default 1)")
    parser.add_argument("--length", type=int, metavar="TOKENS", help="of each sequence; default: the full context")
    parser.add_argument("--dtype", choices=BYTES, default="bf16", help="of keys and values (default bf16)")
    options = parser.parse_args(arguments)
    low = [f"--{name.replace('_', '-')} must be above 0, not {value}" for name in ("vocab_size", "batch", "length")
           if (value := getattr(options, name)) is not None and value <= 0]
    try:
        if low:
            raise ValueError("; ".join(low) + ".")
        shapes = {name: known_vocabulary(preset(name), options.vocab_size) for name in options.names or PRESETS}
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    if options.kv_cache:
        for name, shape in shapes.items():
            print(kv_cache(name, shape, options.batch, options.length or shape.context_length, options.dtype))
        return 0
    rows = [COLUMNS, *(row(name, shape) for name, shape in shapes.items())]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for first, *others in rows:
        print("  ".join([first.ljust(widths[0]), *map(str.rjust, others, widths[1:])]))
    print(f"\nKV cache in bf16. FLOPs to train on a token at full context, attention counted whole. Training state: "
          f"{TRAINING_BYTES} bytes\na parameter (AdamW, bf16 with float32 masters). Presets without a vocabulary of "
          f"their own: {options.vocab_size:,}.")
    return 0


def known_vocabulary(shape: ModelConfig, vocab_size: int) -> ModelConfig:
    """The shape, with that vocabulary if it has none of its own."""
    return shape if shape.vocab_size else shape.model_copy(update={"vocab_size": vocab_size})


def row(name: str, shape: ModelConfig) -> tuple[str, ...]:
    """A preset's line of the table."""
    context = shape.context_length
    return (name, f"{shape.parameter_count:,}", str(shape.layers), f"{shape.dim:,}", str(shape.heads),
            str(shape.kv_heads), str(shape.head_dim), f"{shape.hidden:,}", f"{context:,}",
            f"{shape.kv_cache_bytes(1, 1, 2):,} B", binary(shape.kv_cache_bytes(1, context, 2)),
            f"{shape.flops_per_token(context, causal=False):.3e}", decimal(2 * shape.parameter_count),
            decimal(TRAINING_BYTES * shape.parameter_count))


def kv_cache(name: str, shape: ModelConfig, batch: int, length: int, dtype: str) -> str:
    """What keys and values of a batch take, and how it comes about."""
    size = shape.kv_cache_bytes(batch, length, BYTES[dtype])
    beyond = f"; the context is {shape.context_length:,}" if length > shape.context_length else ""
    return (f"{name}: {size:,} bytes ({binary(size)}) = 2 (keys, values) x {shape.layers} blocks x {batch} x "
            f"{length:,} tokens x {shape.kv_heads} KV heads x {shape.head_dim} x {BYTES[dtype]} bytes{beyond}")


def binary(size: int) -> str:
    """Bytes as memory is counted, in KiB, MiB or GiB."""
    unit, name = next((unit, name) for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))
                      if size >= unit or name == "KiB")
    return f"{size / unit:,.3f} {name}"


def decimal(size: int) -> str:
    """Bytes as disks and weights are counted, in MB or GB."""
    return f"{size / 1e9:,.2f} GB" if size >= 1e9 else f"{size / 1e6:,.1f} MB"


if __name__ == "__main__":
    sys.exit(main())
