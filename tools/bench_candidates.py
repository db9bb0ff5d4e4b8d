"""What tools.bench_train compares: each candidate as a function that makes a training step of one and the same shape.

A candidate runs in processes of its own, so that its memory is its own. It reads a line from standard input for each
round, `steps N`, and answers with a line of JSON: seconds of each step, seconds that it waited for data.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from model.config import ModelConfig

if TYPE_CHECKING:
    import torch

    from pipeline.data.sampling.batch import Batch

SHAPE = ModelConfig(vocab_size=8192, dim=288, layers=6, heads=6, kv_heads=2, ffn_dim=768, context_length=256)
SEQUENCES, LENGTH = 8, 256
Step = Callable[[], tuple[float, float]]
"""Takes one step; returns its loss and the seconds that it waited for data."""


@dataclass(frozen=True)
class Candidate:
    """How to run one: `make` gives its step; ours by train and parallel settings, over so many ranks."""

    make: Callable[[Candidate], Step]
    ranks: int = 1
    train: dict[str, Any] = field(default_factory=dict)
    parallel: dict[str, Any] = field(default_factory=dict)
    compiled: bool = False
    package: str | None = None  # that must be there


def random_batch(step: int, first: int = 0, count: int = SEQUENCES) -> Batch:
    """Sequences [first, first + count) of a step's batch of random tokens, one document each, packed as in training."""
    import numpy as np

    from pipeline.data.sampling.batch import pack

    random = np.random.default_rng(step)
    tokens = random.integers(0, SHAPE.vocab_size or 0, (SEQUENCES, LENGTH + 1))[first:first + count]
    return pack([(row, np.zeros(1, dtype=np.int64)) for row in tokens])


def ours(candidate: Candidate) -> Step:
    """A step of our engine, exactly as training takes it: read ahead, document mask, chunked loss, limits."""
    import torch

    from pipeline.config.batch import BatchPlan
    from pipeline.config.parallel import ParallelConfig
    from pipeline.config.training import TrainConfig
    from pipeline.config.tree import Config
    from pipeline.data.sampling.loader import Prefetcher
    from pipeline.parallel.context_parallel import part_of
    from pipeline.parallel.grid import Grid
    from pipeline.parallel.initial_values import drawn
    from pipeline.parallel.ranks import start_ranks
    from pipeline.training.engines.build import build_engine
    from pipeline.training.guards import StepLimits

    ranks = start_ranks()
    config = Config(train=TrainConfig(micro_batch=SEQUENCES // candidate.ranks, precision="fp32",
                                      sequence_length=LENGTH, batch_tokens=SEQUENCES * LENGTH, **candidate.train),
                    parallel=ParallelConfig(**candidate.parallel))
    grid, plan = Grid(ranks, config.parallel), BatchPlan.of(config.train, config.parallel, ranks.world)
    engine = build_engine(config, SHAPE, grid, torch.float32, plan.accumulation, drawn(SHAPE, 0))

    def part(step: int) -> Batch:
        batch = random_batch(step, plan.first(grid.data_rank), plan.rank_sequences)
        return batch if grid.context == 1 else part_of(batch, grid.context, grid.context_rank)
    loader = Prefetcher(part, range(1_000_000), 1)

    def step() -> tuple[float, float]:
        batch = loader.next()
        result = engine.step(batch.split(plan.micro_batch), plan.accumulation, plan.tokens, 1e-3, StepLimits())
        return result.loss, loader.waited_s
    return step


def plain_step(model: Any, logits: Callable[[torch.Tensor], torch.Tensor]) -> Step:
    """A plain training step around somebody else's model: cross-entropy, clipping, fused AdamW."""
    import torch

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    data = random_batch(0)

    def step() -> tuple[float, float]:
        loss = torch.nn.functional.cross_entropy(logits(data.tokens).flatten(0, 1).float(), data.labels.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(loss.detach()), 0.0
    return step


def transformers_llama(candidate: Candidate) -> Step:
    """The same shape as transformers builds it, with SDPA and plain causal attention."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM
    torch.manual_seed(0)
    settings: dict[str, Any] = {
        "vocab_size": SHAPE.vocab_size, "hidden_size": SHAPE.dim, "intermediate_size": SHAPE.hidden,
        "num_hidden_layers": SHAPE.layers, "num_attention_heads": SHAPE.heads, "num_key_value_heads": SHAPE.kv_heads,
        "max_position_embeddings": LENGTH, "tie_word_embeddings": False, "attn_implementation": "sdpa",
        "use_cache": False}
    model: Any = LlamaForCausalLM(LlamaConfig(**settings)).train()
    forward = torch.compile(model) if candidate.compiled else model
    return plain_step(model, lambda tokens: forward(input_ids=tokens).logits)


def litgpt_llama(candidate: Candidate) -> Step:
    """The same shape as litgpt builds it."""
    import torch
    from litgpt.config import Config as LitConfig
    from litgpt.model import GPT
    torch.manual_seed(0)
    settings: dict[str, Any] = {
        "name": "reference", "block_size": LENGTH, "vocab_size": SHAPE.vocab_size,
        "padded_vocab_size": SHAPE.vocab_size, "n_layer": SHAPE.layers, "n_head": SHAPE.heads,
        "n_query_groups": SHAPE.kv_heads, "n_embd": SHAPE.dim, "intermediate_size": SHAPE.hidden,
        "rotary_percentage": 1.0, "parallel_residual": False, "bias": False, "norm_class_name": "RMSNorm",
        "norm_eps": 1e-5, "mlp_class_name": "LLaMAMLP", "rope_base": 500000}
    model: Any = GPT(LitConfig(**settings)).train()
    return plain_step(model, torch.compile(model) if candidate.compiled else model)


CANDIDATES: dict[str, Candidate] = {
    "ours": Candidate(ours),
    "ours, selective checkpointing": Candidate(ours, train={"activation_checkpointing": "selective"}),
    "ours, every second block": Candidate(ours, train={"activation_checkpointing": "full", "recomputed_blocks": 2}),
    "ours, full checkpointing": Candidate(ours, train={"activation_checkpointing": "full"}),
    "ours, compiled": Candidate(ours, train={"compile": True}),
    "ours, FSDP2 x 2": Candidate(ours, 2),
    "ours, FSDP2 x 2, reshard never": Candidate(ours, 2, parallel={"reshard": "never"}),
    "ours, 2 copies": Candidate(ours, 2, parallel={"dp_replicate": 2}),
    "ours, tensor parallel 2": Candidate(ours, 2, parallel={"tp": 2}),
    "ours, context parallel 2": Candidate(ours, 2, parallel={"cp": 2}),
    "ours, pipeline 2": Candidate(ours, 2, parallel={"pp": 2}),
    **{f"DeepSpeed ZeRO {stage}{' x 2' if ranks == 2 else ''}": Candidate(
        ours, ranks, parallel={"engine": "deepspeed", "zero_stage": stage}, package="deepspeed")
       for ranks in (1, 2) for stage in (1, 2, 3) if ranks == 2 or stage == 2},
    "transformers": Candidate(transformers_llama, package="transformers"),
    "transformers, compiled": Candidate(transformers_llama, compiled=True, package="transformers"),
    "litgpt": Candidate(litgpt_llama, package="litgpt"),
}


def serve(name: str, threads: int) -> None:
    """Be a candidate's process: warm up, say so, and take steps as standard input asks. Ranks but 0 follow rank 0."""
    import torch

    from pipeline.contract.entry import end_process

    torch.set_num_threads(threads)
    candidate = CANDIDATES[name]
    before = memory_mb()
    step = candidate.make(candidate)
    for _ in range(3):  # allocations, compilation
        step()
    leads = os.environ.get("RANK", "0") == "0"
    if leads:
        print(json.dumps({"ready": True, "memory_before_mb": before}), flush=True)
    for line in sys.stdin:
        seconds, waited = [], []
        for _ in range(int(line)):
            began = time.perf_counter()
            waited.append(step()[1])
            seconds.append(time.perf_counter() - began)
        if leads:
            print(json.dumps({"seconds": seconds, "waited": waited, "memory_mb": memory_mb()}), flush=True)
    end_process(0)


def memory_mb() -> float:
    """Largest resident memory of this process so far, in MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6


if __name__ == "__main__":
    serve(sys.argv[1], int(sys.argv[2]))
