"""Measure training steps on this machine's CPU, compared with transformers.

    python -m benchmarks.train
    python -m benchmarks.train --only ours transformers

A step takes 2,048 tokens in fp32 through a model of 10M parameters. Each case runs in new processes, with two threads
in all, one after the other: on a machine that does other work, repeat it.
"""

from __future__ import annotations

import argparse
import os
import sys

import torch

from benchmarks.measuring import Case, add_options, run_cases
from drover.model.config import ModelConfig
from drover.pipeline.config.data import TokenizerConfig
from drover.pipeline.config.training import TrainConfig
from drover.pipeline.config.tree import Config, changed
from drover.pipeline.core.console import Program

CONFIG = Config(
    tokenizer=TokenizerConfig(vocab_size=8192),
    model=ModelConfig(vocab_size=8192, dim=288, layers=6, heads=6, kv_heads=2, ffn_dim=768, context_length=256),
    train=TrainConfig(sequence_length=256, batch_tokens=2048, micro_batch=8, precision="fp32",
                      across_documents=True))
HALF = {"train.micro_batch": 4}
CASES = [
    Case("ours"),
    Case("ours, selective checkpointing", {"train.activation_checkpointing": "selective"}),
    Case("ours, full checkpointing", {"train.activation_checkpointing": "full"}),
    Case("FSDP2 x 2", HALF, ranks=2),
    Case("FSDP2 x 2, reshard never", HALF | {"parallel.reshard": "never"}, ranks=2),
    Case("2 replicas", HALF | {"parallel.dp_replicate": 2}, ranks=2),
    Case("tensor parallel 2", {"parallel.tp": 2}, ranks=2),
    *(Case(f"DeepSpeed ZeRO {stage} x 2", HALF | {"parallel.engine": "deepspeed", "parallel.zero_stage": stage},
           ranks=2) for stage in (1, 2, 3)),
    Case("transformers", library=True),
]


def work(options: argparse.Namespace) -> int:
    """Measure the chosen cases; 1 if one failed."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    if options.in_process:
        torch.set_num_threads(2 // int(os.environ["WORLD_SIZE"]))
    return run_cases("benchmarks.train", CASES, options, config_of)


def config_of(case: Case) -> Config:
    """The configuration with the case's settings."""
    return changed(CONFIG, case.settings)


main = Program("python -m benchmarks.train", __doc__, lambda parser: add_options(parser, CASES), work)

if __name__ == "__main__":
    sys.exit(main())
