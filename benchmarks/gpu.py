"""Measure training steps of one GPU at shapes of Llama 3, compared with transformers.

    python -m benchmarks.gpu
    python -m benchmarks.gpu --only "8b, documents" transformers --layers 4
    python -m benchmarks.gpu --tiny --only "8b, eager"

Steps take sequences of 8,192 tokens in bf16, compiled and without checkpointing unless it is named. `8b` means --layers
layers of Llama 3 8B. With documents, sequences hold documents of 1,024 tokens. MFU counts attention in full. The peak
that `drover rehearse` counts is next to the measured one. A case runs in a process of its own, so one that fails stops
no other. --tiny takes a small model, also on a CPU; there cases that compile need a C++ compiler.
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

TINY = ModelConfig(dim=64, layers=2, heads=4, kv_heads=2, ffn_dim=128, vocab_size=512, context_length=256)
CAUSAL = {"train.across_documents": True}
EAGER = {"train.compile": False}
CASES = [
    Case("1b, documents", {"model": PRESETS["llama3.2_1b"]}),
    Case("8b, documents"),
    Case("8b, documents, eager", EAGER),
    *(Case(f"8b, documents, {name}", {"train.attention": name}) for name in ("flex", "sdpa")),
    Case("8b, documents, Muon", {"train.optimizer": "muon"}),
    *(Case(f"8b, documents, ZeRO {stage}", {"parallel.engine": "deepspeed", "parallel.zero_stage": stage,
                                            "train.compile": stage < 3}) for stage in (1, 2, 3)),
    Case("8b", CAUSAL),
    Case("8b, eager", CAUSAL | EAGER),
    *(Case(f"8b, {kind} checkpointing", CAUSAL | {"train.activation_checkpointing": kind})
      for kind in ("selective", "full")),
    *(Case(f"8b, fp8 {recipe}", CAUSAL | {"train.precision": "fp8", "train.fp8_recipe": recipe})
      for recipe in ("tensorwise", "rowwise")),
    Case("transformers", EAGER, library=True),
]


def add_own_options(parser: Parser) -> None:
    """The options."""
    add_options(parser, CASES)
    parser.add_argument("--layers", type=int, default=8, help="layers of Llama 3 8B (%(default)s)")
    parser.add_argument("--tiny", action="store_true", help="a small model, also on a CPU")


def work(options: argparse.Namespace) -> int:
    """Measure the chosen cases; 1 if one failed."""
    if not options.tiny and not torch.cuda.is_available():
        raise UserError("torch sees no GPU on this machine. --tiny needs none.")
    return run_cases("benchmarks.gpu", CASES, options, partial(config_of, options), f"--layers={options.layers}",
                     *["--tiny"] * options.tiny)


def config_of(options: argparse.Namespace, case: Case) -> Config:
    """The case's settings, with one sequence in a step."""
    model = changed(PRESETS["llama3_8b"], {"layers": options.layers})
    config = changed(Config(), {"model": model, "train.micro_batch": 1, "train.precision": "bf16",
                                "train.compile": True, **case.settings})
    model = TINY if options.tiny else changed(config.model, {
        "vocab_size": 128_256, "context_length": 8192, "rope_scaling": None})
    return changed(config, {"model": model, "train.sequence_length": model.context_length,
                            "train.batch_tokens": model.context_length})


main = Program("python -m benchmarks.gpu", __doc__, add_own_options, work)

if __name__ == "__main__":
    sys.exit(main())
