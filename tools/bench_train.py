"""How fast does training go? Ours and transformers' Llama side by side in one run, as a table and JSON.

    python -m tools.bench_train
    python -m tools.bench_train --steps 3 --json out.json

The shape is the reference for CPUs: vocabulary 8192, width 288, 6 layers, 6 query and 2 kv heads, feed-forward 768,
untied, fp32, batch 8 x 256, AdamW and clipping. Rounds of the candidates alternate, so that a slow moment of the
machine meets all of them; the median step of each is what counts.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from model.config import ModelConfig
from pipeline.config.training import ParallelConfig, TrainConfig
from pipeline.data.loader import Batch
from pipeline.parallel.ranks import Ranks, start_ranks, stop_ranks
from pipeline.parallel.spreading import spread
from pipeline.training.engine import Engine
from pipeline.training.optimizer import build_optimizer

SHAPE = ModelConfig(vocab_size=8192, dim=288, layers=6, heads=6, kv_heads=2, ffn_dim=768, context_length=256)
SEQUENCES, LENGTH = 8, 256
Step = Callable[[], float]


def batch() -> Batch:
    """One batch of random tokens, one document a sequence; the same for every candidate."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, SHAPE.vocab_size or 0, (SEQUENCES, LENGTH + 1), generator=generator)
    positions = torch.arange(LENGTH).expand(SEQUENCES, LENGTH)
    documents = torch.zeros(SEQUENCES, LENGTH, dtype=torch.int32)
    return Batch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), documents, positions, SEQUENCES * LENGTH)


def ours(ranks: Ranks, checkpointing: str) -> Step:
    """A step of our engine, exactly as training takes it: FSDP2 on one rank, document mask, chunked loss."""
    model = spread(SHAPE, 0, ranks.mesh(ParallelConfig()), torch.float32, checkpointing)
    engine = Engine(model, build_optimizer(model, TrainConfig(), tied=False), ranks, clip_norm=1.0)
    data = batch()
    return lambda: engine.step(iter([data]), 1, data.targets, 1e-3).loss


def transformers_llama(ranks: Ranks, compiled: bool) -> Step:
    """The same shape as transformers builds it, with SDPA, plain causal attention and a plain training step."""
    from transformers import LlamaConfig, LlamaForCausalLM
    torch.manual_seed(0)
    settings: dict[str, Any] = {
        "vocab_size": SHAPE.vocab_size, "hidden_size": SHAPE.dim, "intermediate_size": SHAPE.hidden,
        "num_hidden_layers": SHAPE.layers, "num_attention_heads": SHAPE.heads, "num_key_value_heads": SHAPE.kv_heads,
        "max_position_embeddings": LENGTH, "tie_word_embeddings": False, "attn_implementation": "sdpa",
        "use_cache": False}
    model: Any = LlamaForCausalLM(LlamaConfig(**settings)).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    forward, data = torch.compile(model) if compiled else model, batch()

    def step() -> float:
        logits = forward(input_ids=data.tokens).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), data.labels.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(loss.detach())
    return step


CANDIDATES: dict[str, Callable[[Ranks], Step]] = {
    "ours": partial(ours, checkpointing="none"),
    "ours, selective checkpointing": partial(ours, checkpointing="selective"),
    "ours, full checkpointing": partial(ours, checkpointing="full"),
    "transformers": partial(transformers_llama, compiled=False),
    "transformers, compiled": partial(transformers_llama, compiled=True),
}


def matrix_peak(size: int = 2048, rounds: int = 5) -> float:
    """FLOP/s of the best of a few fp32 products of square matrices: the ceiling that MFU is taken of."""
    left, right = torch.randn(size, size), torch.randn(size, size)
    best = min(_timed(lambda: float((left @ right)[0, 0])) for _ in range(rounds))
    return 2 * size**3 / best


def measure(names: list[str], steps: int, rounds: int) -> dict[str, Any]:
    """Alternate `rounds` of `steps` steps of each candidate; seconds of every step but the warm-up."""
    ranks = start_ranks()
    made = {name: CANDIDATES[name](ranks) for name in names}
    for step in made.values():
        for _ in range(2):  # warm up: allocations, compilation
            step()
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(rounds):
        for name, step in made.items():
            seconds[name] += [_timed(step) for _ in range(steps)]
    stop_ranks()
    peak = matrix_peak()
    return {"parameters": SHAPE.parameter_count, "batch": [SEQUENCES, LENGTH], "threads": torch.get_num_threads(),
            "torch": torch.__version__, "matrix_peak_gflops": round(peak / 1e9, 1),
            "candidates": {name: _figures(times, peak) for name, times in seconds.items()}}


def _figures(times: list[float], peak: float) -> dict[str, Any]:
    middle = statistics.median(times)
    rate = SEQUENCES * LENGTH / middle
    causal, full = (rate * SHAPE.flops_per_token(LENGTH, causal=halved) for halved in (True, False))
    return {"tokens_per_s": round(rate, 1), "step_s": {"min": min(times), "median": middle, "max": max(times)},
            "tflops": round(causal / 1e12, 4), "mfu_causal": round(causal / peak, 4), "mfu_full": round(full / peak, 4)}


def table(result: dict[str, Any]) -> str:
    """The result for a person; ratios are to the first candidate of transformers, where it ran."""
    rows = result["candidates"]
    base = rows.get("transformers", {}).get("tokens_per_s")
    lines = [f"{result['parameters']:,} parameters, batch {SEQUENCES} x {LENGTH}, fp32, {result['threads']} threads, "
             f"torch {result['torch']}, matrix peak {result['matrix_peak_gflops']:.0f} GFLOP/s",
             f"{'':<32}{'tokens/s':>10}{'ratio':>8}{'MFU causal':>12}{'MFU full':>10}{'step min/median/max ms':>26}"]
    for name, row in rows.items():
        span = "/".join(f"{row['step_s'][key] * 1e3:.0f}" for key in ("min", "median", "max"))
        ratio = f"{row['tokens_per_s'] / base:.2f}" if base else "-"
        lines.append(f"{name:<32}{row['tokens_per_s']:>10,.0f}{ratio:>8}{row['mfu_causal']:>12.1%}"
                     f"{row['mfu_full']:>10.1%}{span:>26}")
    return "\n".join(lines)


def _timed(action: Callable[[], float]) -> float:
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


def main(arguments: list[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tools.bench_train", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=3, help="steps of each candidate per round")
    parser.add_argument("--rounds", type=int, default=5, help="rounds; candidates alternate")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads")
    parser.add_argument("--only", nargs="+", choices=list(CANDIDATES), default=list(CANDIDATES), help="candidates")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    result = measure(options.only, options.steps, options.rounds)
    print(table(result))
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
