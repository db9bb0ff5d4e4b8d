"""Measure training steps of one GPU, in nine minutes, the most important first, compared with transformers.

    python -m benchmarks.gpu --to rows.jsonl
    python -m benchmarks.gpu --only "8b, documents" transformers --layers 4
    python -m benchmarks.gpu --tiny --only "8b, eager"

d12 (12 layers of width 768, 32,768 ids) takes 32 sequences of 2,048 tokens, with Muon 256. 10m is the shape of
configs/shakespeare_char_gpu.yaml. `8b` means --layers layers of Llama 3 8B; it and 1b take a sequence of 8,192 tokens.
All are in bf16, compiled, and without checkpointing unless it is named. With documents, sequences hold documents of
1,024 tokens. MFU counts attention in full. The peak that `drover rehearse` counts is next to the measured one.

A case runs in a process of its own, so one that fails or takes too long stops no other. Its row is written at once.
--tiny takes small models and batches, also on a CPU; there cases that compile need a C++ compiler.
"""

from __future__ import annotations

import argparse
import sys
from functools import partial

import torch

from benchmarks.measuring import Case, add_options, run_cases
from drover.model.config import ModelConfig
from drover.model.presets import PRESETS
from drover.pipeline.config.tree import Config, changed
from drover.pipeline.core.console import Parser, Program
from drover.pipeline.core.errors import UserError


def _long(preset: ModelConfig) -> ModelConfig:
    """A shape of Llama 3 with sequences of 8,192 tokens."""
    return changed(preset, {"vocab_size": 128_256, "context_length": 8192, "rope_scaling": None})


TINY = ModelConfig(dim=64, layers=2, heads=4, kv_heads=2, ffn_dim=128, vocab_size=512, context_length=256)
D12 = ModelConfig(dim=768, layers=12, heads=6, kv_heads=6, ffn_dim=2048, vocab_size=32_768, context_length=2048)
SMALL = ModelConfig(dim=384, layers=6, heads=6, kv_heads=3, ffn_dim=1088, vocab_size=640, context_length=256)
CAUSAL = {"train.across_documents": True}
EAGER = {"train.compile": False}
MUON = {"train.optimizer": "muon"}
OF_D12 = CAUSAL | {"model": D12, "train.micro_batch": 32}
CASES = [
    Case("d12", OF_D12, sequences=32),
    Case("10m", CAUSAL | {"model": SMALL, "tokenizer.vocab_size": 640, "train.micro_batch": 64}, sequences=64),
    Case("1b, documents", {"model": _long(PRESETS["llama3.2_1b"])}),
    Case("8b", CAUSAL),
    Case("8b, fp8 tensorwise", CAUSAL | {"train.precision": "fp8", "train.fp8_recipe": "tensorwise"}),
    Case("d12, Muon", OF_D12 | MUON, sequences=256),
    Case("8b, documents"),
    Case("transformers", EAGER, library=True),
    *(Case(f"8b, documents, {name}", {"train.attention": name}) for name in ("flex", "sdpa")),
    Case("8b, documents, eager", EAGER),
    Case("8b, documents, Muon", MUON),
    *(Case(f"8b, documents, ZeRO {stage}", {"parallel.engine": "deepspeed", "parallel.zero_stage": stage,
                                            "train.compile": stage < 3}) for stage in (1, 2, 3)),
    Case("8b, eager", CAUSAL | EAGER),
    *(Case(f"8b, {kind} checkpointing", CAUSAL | {"train.activation_checkpointing": kind})
      for kind in ("selective", "full")),
    Case("8b, fp8 rowwise", CAUSAL | {"train.precision": "fp8", "train.fp8_recipe": "rowwise"}),
]


def add_own_options(parser: Parser) -> None:
    """The options."""
    add_options(parser, CASES, minutes=9.0)
    parser.add_argument("--layers", type=int, default=8, help="layers of Llama 3 8B (%(default)s)")
    parser.add_argument("--tiny", action="store_true", help="a small model, also on a CPU")


def work(options: argparse.Namespace) -> int:
    """Measure the chosen cases; 1 if one failed."""
    if not options.tiny and not torch.cuda.is_available():
        raise UserError("torch sees no GPU on this machine. --tiny needs none.")
    return run_cases("benchmarks.gpu", CASES, options, partial(config_of, options), f"--layers={options.layers}",
                     *["--tiny"] * options.tiny)


def config_of(options: argparse.Namespace, case: Case) -> Config:
    """The case's settings."""
    model = changed(_long(PRESETS["llama3_8b"]), {"layers": options.layers})
    config = changed(Config(), {"model": model, "train.micro_batch": 1, "train.precision": "bf16",
                                "train.compile": True, **case.settings})
    model, sequences = (TINY, 1) if options.tiny else (config.model, case.sequences)
    return changed(config, {"model": model, "train.sequence_length": model.context_length,
                            "train.micro_batch": min(config.train.micro_batch, sequences),
                            "train.batch_tokens": sequences * model.context_length})


main = Program("python -m benchmarks.gpu", __doc__, add_own_options, work)

if __name__ == "__main__":
    sys.exit(main())
