"""Training steps to be timed: ours as training takes it, and those of transformers and litgpt at the same shape."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from model.config import ModelConfig
from model.loss import Losses
from pipeline.config.batch import BatchPlan
from pipeline.config.tree import Config
from pipeline.data.sampling.batch import Batch, pack
from pipeline.parallel.context_parallel import part_of
from pipeline.parallel.grid import Grid, own
from pipeline.parallel.ranks import Ranks, start_ranks
from pipeline.training.engines.build import build_engine
from pipeline.training.guards import StepLimits

DOCUMENT_TOKENS = 1024
"""Mean length of the made-up documents."""
Step = Callable[[], float]
"""Takes a step; returns its loss, which is on the host then."""


@cache
def ranks() -> Ranks:
    """The process group, joined once."""
    return start_ranks()


def begins(length: int, seed: int = 0) -> list[int]:
    """Where made-up documents start in a sequence, 0 first: lengths are spread evenly around the mean."""
    random, found = np.random.default_rng(seed), [0]
    mean = min(DOCUMENT_TOKENS, length // 4)
    while found[-1] < length:
        found.append(found[-1] + int(random.integers(mean // 2, 3 * mean // 2)))
    return found[:-1]


def batch(config: ModelConfig, length: int, sequences: int, seed: int, documents: bool = True) -> Batch:
    """Random tokens, in packed documents or one document a sequence."""
    random = np.random.default_rng(seed)
    return pack([(random.integers(0, config.vocab_size or 0, length + 1),
                  np.array(begins(length, seed + row) if documents else [0])) for row in range(sequences)])


@torch.no_grad()
def fill(model: nn.Module, config: ModelConfig) -> None:
    """Draw weights of the usual sizes on the device; zeros would run faster than real ones."""
    for name, parameter in model.named_parameters():
        local = own(parameter)
        if name.endswith("norm.weight"):
            local.fill_(1)
        else:
            local.normal_(std=config.dim**-0.5 if name == "output.weight" else 0.02)


class OurStep:
    """A step of our engine over all ranks, each time on the same batch.

    Args:
        initial: draws the initial weights; None: they are filled on the device.
        documents: whether sequences hold several documents. across: whether attention ignores where these end.
    """

    def __init__(self, config: Config, dtype: torch.dtype, initial: Any = None, documents: bool = True,
                 across: bool = False) -> None:
        grid = Grid(ranks(), config.parallel)
        self.plan = plan = BatchPlan.of(config.train, config.parallel, ranks().world)
        self.engine: Any = build_engine(config, config.model, grid, dtype, plan.accumulation, initial)
        if initial is None:
            fill(self.engine.model, config.model)
        if across:
            self.engine.across_documents = True
        self.data = batch(config.model, plan.sequence_length, plan.micro_batch * plan.accumulation, grid.data_rank,
                          documents)
        first_of_its_data = grid.tensor_rank == grid.context_rank == grid.pipeline_rank == 0
        self.targets = round(ranks().sum(float(self.data.targets * first_of_its_data))[0])
        if grid.context > 1:
            self.data = part_of(self.data, grid.context, grid.context_rank)

    def __call__(self) -> float:
        """Take a step. ArithmeticError where it gave NaN, which the limits leave out."""
        result = self.engine.step(self.data.split(self.plan.micro_batch), self.plan.accumulation, self.targets, 1e-5,
                                  StepLimits())
        if not result.applied:
            raise ArithmeticError(f"the step gave {result}")
        return float(result.loss)


class OtherLosses(Losses):
    """Another implementation of the head's loss in the place of ours."""

    def __init__(self, function: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        self.function = function

    def total(self, hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        """As in Losses."""
        return self.function(hidden.flatten(0, 1), weight, labels.flatten())


def library_step(library: str, config: ModelConfig, length: int, sequences: int, compiled: bool,
                 device: torch.device, autocast: bool) -> Step:
    """A plain step of transformers or litgpt: SDPA with plain causal attention, float32 weights (bf16 by autocast),
    cross-entropy, clipping, fused AdamW."""
    torch.manual_seed(0)
    with device:
        model = (_transformers if library == "transformers" else _litgpt)(config, length).float().train()
    forward: Any = torch.compile(model) if compiled else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    data = batch(config, length, sequences, seed=0)
    tokens, labels = data.tokens.to(device), data.labels.to(device)

    def step() -> float:
        with torch.autocast(device.type, torch.bfloat16, enabled=autocast):
            out = forward(tokens)
            logits = out.logits if library == "transformers" else out
            loss = nn.functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(loss.detach())
    return step


def _transformers(config: ModelConfig, length: int) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM
    settings: dict[str, Any] = {
        "vocab_size": config.vocab_size, "hidden_size": config.dim, "intermediate_size": config.hidden,
        "num_hidden_layers": config.layers, "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads, "max_position_embeddings": length,
        "tie_word_embeddings": config.tied_embeddings, "attn_implementation": "sdpa", "use_cache": False}
    model: nn.Module = LlamaForCausalLM(LlamaConfig(**settings))
    return model


def _litgpt(config: ModelConfig, length: int) -> nn.Module:
    from litgpt.config import Config as LitConfig
    from litgpt.model import GPT
    settings: dict[str, Any] = {
        "name": "reference", "block_size": length, "vocab_size": config.vocab_size,
        "padded_vocab_size": config.vocab_size, "n_layer": config.layers, "n_head": config.heads,
        "n_query_groups": config.kv_heads, "n_embd": config.dim, "intermediate_size": config.hidden,
        "rotary_percentage": 1.0, "parallel_residual": False, "bias": False, "norm_class_name": "RMSNorm",
        "norm_eps": 1e-5, "mlp_class_name": "LLaMAMLP", "rope_base": 500000}
    model: nn.Module = GPT(LitConfig(**settings))
    return model
