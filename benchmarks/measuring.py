"""What the benchmarks share: training steps, each case in processes of its own, and tables."""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from subprocess import PIPE, Popen, TimeoutExpired
from typing import Any

import numpy as np
import torch
from torch.nn.functional import cross_entropy

from drover.pipeline.config.phases import BatchPlan
from drover.pipeline.config.tree import Config
from drover.pipeline.core.console import Parser, markdown
from drover.pipeline.core.errors import installed_version
from drover.pipeline.data.sampling.batch import Batch, pack
from drover.pipeline.formats.huggingface import config_to_json
from drover.pipeline.parallel.fsdp import drawn
from drover.pipeline.parallel.grid import Grid
from drover.pipeline.parallel.ranks import Ranks, start_ranks
from drover.pipeline.rehearsal.fitting import rehearse_apart
from drover.pipeline.training.device import DTYPES, memory_mb, peak_flops
from drover.pipeline.training.guards import StepLimits
from drover.pipeline.training.set_up import build_engine

DOCUMENT_TOKENS = 1024
WARM_UP = 3
STEPS = 5
MOST = 0.25
"""Share of the time that a case may take."""
PACKAGES = ("torch", "transformers", "deepspeed", "torchao", "datatrove", "fastokens")
COLUMNS = {"tokens/s": "{:,.0f}", "of transformers": "{:.2f}", "MFU": "{:.1%}",
           "peak GB of a rank": "{:.2f}", "rehearsed": "{:.2f}", "failure": "{}"}
Row = dict[str, Any]
"""Figures by their column; missing or None if they are not known."""


@dataclass(frozen=True)
class Case:
    """A training step to be measured.

    settings: values by `section.key`. library: transformers' step at the same shape, not ours. sequences: in a step,
        where only the GPU's cases differ.
    """

    name: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    library: bool = False
    ranks: int = 1
    sequences: int = 1


def add_options(parser: Parser, cases: Sequence[Case], minutes: float = 1440.0) -> None:
    """The options of benchmarks of training steps. minutes: after which no case begins, by default."""
    names = [case.name for case in cases]
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="CASE",
                        help=f"measure these: {'; '.join(names)} (default: all)")
    parser.add_argument("--to", type=Path, metavar="FILE", help="also add each row to this file, as JSON")
    parser.add_argument("--minutes", type=float, default=minutes, help="begin no case later (default %(default)s)")
    parser.add_argument("--in-process", action="store_true", help="measure one in this process, and print JSON")


def run_cases(module: str, cases: Sequence[Case], options: Namespace, config_of: Callable[[Case], Config],
              *arguments: str) -> int:
    """Measure the cases of `--only` and print their table; 1 if one failed.

    module: the benchmark, which is started for each case with `--in-process` and the arguments.
    """
    chosen = [case for case in cases if case.name in options.only]
    if options.in_process:
        row = measured_step(config_of(chosen[0]), chosen[0].library)
        if os.environ["RANK"] == "0":
            print("\n" + json.dumps(row), flush=True)
        return 0
    print_machine()
    rows = dict[str, Row]()
    end = time.monotonic() + 60 * options.minutes
    for case in chosen:
        left = min(60 * MOST * options.minutes, end - time.monotonic())
        row = in_processes(module, case, arguments, left) if left > 0 else {"failure": "no time was left"}
        rows[case.name] = row
        line = json.dumps({"case": case.name, **row})
        print(line, flush=True)
        if options.to:
            with open(options.to, "a", encoding="utf-8") as file:
                file.write(f"{line}\n")
    baseline = rows.get("transformers", {}).get("tokens/s")
    for row in rows.values():
        if baseline and "tokens/s" in row:
            row["of transformers"] = row["tokens/s"] / baseline
    print_table(rows, COLUMNS)
    return int(any("failure" in row for row in rows.values()))


def in_processes(module: str, case: Case, arguments: Sequence[str], most_s: float | None = None) -> Row:
    """Measure a case in processes of its own, so that no memory, compiled code or failure of another counts. most_s:
    seconds that it may take."""
    with Popen([sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={case.ranks}",
                "-m", module, "--in-process", *arguments, "--only", case.name],
               stdout=PIPE, stderr=PIPE, text=True) as ranks:
        try:
            output, errors = ranks.communicate(timeout=most_s)
        except TimeoutExpired:
            ranks.terminate()  # torchrun then ends its ranks, which are in sessions of their own
            ranks.communicate()
            return {"failure": f"it took longer than {most_s:.0f} s"}
    if ranks.returncode:
        return {"failure": next((line for line in errors.splitlines() if "rror: " in line), "no error message")}
    row: Row = json.loads(output.splitlines()[-1])
    return row


def measured_step(config: Config, library: bool) -> Row:
    """Take training steps on the ranks that were started: ours, or the library's. MFU is by the FLOPs of full
    attention. On GPUs `rehearsed` is the peak that a rehearsal counts."""
    ranks, train = start_ranks(), config.train
    step = library_step(config, ranks.device) if library else our_step(config, ranks)
    middle = statistics.median([seconds(step) for _ in range(WARM_UP + STEPS)][WARM_UP:])
    peak = peak_flops(ranks.device)
    flops = train.batch_tokens * config.model.flops_per_token(train.sequence_length, causal=False)
    row: Row = {"tokens/s": train.batch_tokens / middle,
                "MFU": peak and flops / middle / ranks.world / peak, "peak GB of a rank": memory_mb(ranks.device) / 1e3}
    if ranks.device.type == "cuda" and not library and config.parallel.engine == "fsdp2":
        row["rehearsed"] = rehearse_apart(config, 1, [0])[0].peak.bytes / 1e9
    ranks.barrier()
    return row


def seconds(action: Callable[[], object]) -> float:
    """Time one call."""
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


def our_step(config: Config, ranks: Ranks) -> Callable[[], None]:
    """A step of our engine over all ranks, each time on the same batch. As in training, the host reads the step before
    on GPUs when it has queued the passes."""
    plan = BatchPlan.of(config.train, config.parallel, ranks.world)
    dtype = DTYPES["bf16" if config.train.precision == "fp8" else config.train.precision]
    engine: Any = build_engine(config, config.model, Grid(ranks, config.parallel), dtype, plan.accumulation,
                               drawn(config.model, 0))
    data = batch(config, plan.micro_batch * plan.accumulation)
    targets = torch.tensor(plan.tokens, dtype=torch.float64)
    is_queued = False

    def step() -> None:
        nonlocal is_queued
        if not engine.queues:
            result = engine.step(data.split(plan.micro_batch), plan.accumulation, plan.tokens, 1e-5, StepLimits())
            assert result.applied, result
            return
        engine.compute(data.split(plan.micro_batch), plan.accumulation, targets)
        if is_queued:
            result = engine.result()
            assert result.applied, result
        engine.update(1e-5, StepLimits())
        is_queued = True
    return step


def batch(config: Config, sequences: int) -> Batch:
    """Random tokens in documents of DOCUMENT_TOKENS."""
    random, length = np.random.default_rng(0), config.train.sequence_length
    starts = np.arange(0, length, DOCUMENT_TOKENS)
    return pack([(random.integers(0, config.model.vocab_size or 0, length + 1), starts) for _ in range(sequences)])


def library_step(config: Config, device: torch.device) -> Callable[[], None]:
    """A plain step of transformers: SDPA with plain causal attention, float32 weights (bf16 by autocast),
    cross-entropy, clipping, fused AdamW."""
    from transformers import LlamaConfig, LlamaForCausalLM

    theirs = {**config_to_json(config.model, torch.float32), "attn_implementation": "sdpa", "use_cache": False}
    with device:
        model: Any = LlamaForCausalLM(LlamaConfig(**theirs)).float().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    data = batch(config, config.train.batch_tokens // config.train.sequence_length)
    tokens, labels = data.tokens.to(device), data.labels.to(device)

    def step() -> None:
        with torch.autocast(device.type, torch.bfloat16, enabled=config.train.precision != "fp32"):
            logits = model(tokens).logits
            loss = cross_entropy(logits.flatten(0, 1).float(), labels.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        loss.item()
    return step


def print_machine() -> None:
    """Print time, cores, load and versions."""
    versions = ", ".join(f"{name} {installed_version(name)}" for name in PACKAGES)
    print(f"{datetime.now(UTC):%Y-%m-%d %H:%M}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, {versions}")


def print_table(rows: Mapping[str, Row], columns: Mapping[str, str]) -> None:
    """Print a table of Markdown. columns: formats of the figures."""
    cells = [[name, *("-" if row.get(column) is None else form.format(row[column]) for column, form in columns.items())]
             for name, row in rows.items()]
    print("\n".join(["", *markdown([["", *columns], *cells])]))
