"""Which layers each stage of a pipeline has. Without torch, so that plans use the same code as training."""

from __future__ import annotations

from collections.abc import Sequence

from drover.model.config import ModelConfig
from drover.pipeline.config.training import ParallelConfig

UNKNOWN_WEIGHT = 1.0
"""The assumed weight of embedding or output matrix, in layers, while the vocabulary is unknown."""


def stage_layers(model: ModelConfig, stages: int) -> list[range]:
    """The layers of every stage, in order; each has at least one.

    The weight of the largest stage is as small as possible, whatever else its rank holds. The embedding and the output
    matrix count by their weights, in layers: each is 2.4 layers in Llama 3's 8B, 1.2 in 70B, 0.7 in 405B. If the
    division leaves a remainder, later stages get more layers, because earlier ones hold more activations.
    """
    counts = [1] * stages
    for _ in range(model.layers - stages):
        cost = _costs(model, counts)
        counts[min(range(stages), key=lambda stage: (cost[stage], -stage))] += 1
    firsts = [sum(counts[:stage]) for stage in range(stages)]
    return [range(first, first + count) for first, count in zip(firsts, counts, strict=True)]


def _costs(model: ModelConfig, counts: Sequence[int], embedding: bool = True) -> list[float]:
    """The weights of stages with so many layers, in layers; without `embedding`, their computation."""
    cost = [float(count) for count in counts]
    cost[0] += _ends(model) * embedding
    cost[-1] += _ends(model)
    return cost


def _ends(model: ModelConfig) -> float:
    """The embedding's weights, in layers; the output matrix has as many."""
    if model.vocab_size is None:
        return UNKNOWN_WEIGHT
    layer = 2 * model.dim * (model.heads + model.kv_heads) * model.head_width + 3 * model.dim * model.hidden
    return model.vocab_size * model.dim / layer


def bubble(model: ModelConfig, parallel: ParallelConfig, micro_batches: int) -> float:
    """The bubble: time that a step of a pipeline loses by waiting, as a share of its busiest rank's computing time.

    Each rank waits while a micro-batch passes through the stages before and after its own: p - 1 times the costliest
    stage. Costs are in layers. The output matrix counts as in `stage_layers`. The embedding counts nothing, because it
    multiplies nothing.
    """
    if parallel.pp == 1:
        return 0.0
    cost = _costs(model, [len(layers) for layers in stage_layers(model, parallel.stages)], embedding=False)
    busiest = max(sum(cost[stage] for stage in parallel.stages_of(rank)) for rank in range(parallel.pp))
    return (parallel.pp - 1) * max(cost) / (micro_batches * busiest)
