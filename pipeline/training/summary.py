"""A summary of the training that starts, in a few lines."""

from __future__ import annotations

import torch

from drover.model.config import ModelConfig
from drover.model.kernels import chosen
from drover.pipeline.config.batch import BatchPlan
from drover.pipeline.config.phases import PhasePlan
from drover.pipeline.config.tree import Config
from drover.pipeline.core.console import counted
from drover.pipeline.core.files import Record
from drover.pipeline.data.sampling.consumption import planned_by
from drover.pipeline.data.sampling.loader import TrainingData
from drover.pipeline.parallel.grid import Grid
from drover.pipeline.training.engines.engine import Engine


def summary_lines(config: Config, model: ModelConfig, grid: Grid, data: TrainingData, precision: str) -> list[str]:
    """The model, its layout, and the batch. precision: the chosen one, and why."""
    train = config.train
    ranks = grid.ranks
    plan = PhasePlan.of(config.train)
    batch = BatchPlan.of(plan.phases[0].train, config.parallel, ranks.world)
    samples = plan.sequences_between(0, plan.steps)
    return [f"{model.parameter_count:,} parameters; {precision}; "
            f"{counted(torch.get_num_threads(), 'thread')} a rank; {_layout(config, grid)}",
            f"{'first ' if plan.declared else ''}batch {batch}; {train.steps:,} steps = {plan.tokens:,} tokens, "
            f"{max(data.order.epochs(samples).values()):.2f} epochs",
            *map(str, data.packings)]


def packing_facts(data: TrainingData) -> Record:
    """Facts about the packing of documents and the planned tokens of phases; {} if documents are concatenated."""
    if not data.packings:
        return {}
    result = planned_by(data.order)
    return {"packing": {"kind": "best_fit", **data.packing_facts()},
            "planned": {"plan_sha256": data.order.links[-1], "tokens": result.phases, "padding": result.padding}}


def kernel_lines(config: Config, engine: Engine, device: torch.device, dtype: torch.dtype) -> list[str]:
    """The attention kernels and, if there is a choice (float32 on CPUs), matrix products'; and why not faster ones."""
    attention = engine.attention
    result = [f"attention {attention.backend.name}{f', flash kernels {engine.flash}' * (device.type == 'cuda')}"]
    if device.type == "cpu" and dtype == torch.float32 and not config.train.compile:
        result.append(f"float32 products {chosen()}")
    fallback = attention.fallback and (not config.train.across_documents or config.parallel.cp > 1)
    return ["; ".join(result), *([attention.fallback] if fallback else [])]


def _layout(config: Config, grid: Grid) -> str:
    """The parallel layout in a few words."""
    parallel = config.parallel
    if parallel.engine == "deepspeed":
        offload = f", {parallel.offload} in host memory" if parallel.offload != "none" else ""
        return f"DeepSpeed ZeRO {parallel.zero_stage}{offload}"
    splits = {"tensor": grid.tensor, "context": grid.context, "pipeline": grid.pipeline}
    named = "".join(f", {name} parallel {ranks}" for name, ranks in splits.items() if ranks > 1 or name == "tensor")
    stages = f" ({parallel.pp_schedule}, {parallel.stages} stages)" if grid.pipeline > 1 else ""
    return f"FSDP2 {grid.replicate} x {grid.shard}{named}{stages}"
