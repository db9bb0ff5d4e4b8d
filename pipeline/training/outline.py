"""What is about to be trained, in a few lines."""

from __future__ import annotations

import torch

from model.config import ModelConfig
from pipeline.config.tree import Config
from pipeline.data.loader import TrainingData
from pipeline.parallel.grid import Grid


def outline(config: Config, model: ModelConfig, grid: Grid, data: TrainingData, precision: str) -> list[str]:
    """The model and how it is spread, and the batch; precision: which was chosen and why."""
    train, ranks = config.train, grid.ranks
    sequences = train.batch_tokens // train.sequence_length
    accumulation = sequences // (grid.data_ranks * train.micro_batch)
    return [f"{model.parameter_count:,} parameters; {precision}; {ranks.world} ranks on {ranks.device.type}, "
            f"{torch.get_num_threads()} threads each; {_layout(config, grid)}",
            f"batch {train.batch_tokens:,} tokens = {sequences} sequences of {train.sequence_length} = "
            f"{grid.data_ranks} ranks x {accumulation} micro-batches of {train.micro_batch}; {train.steps} steps, "
            f"{train.steps * train.batch_tokens:,} tokens, "
            f"{max(data.order.epochs(train.steps * sequences).values()):.2f} epochs"]


def _layout(config: Config, grid: Grid) -> str:
    """How the model is spread, in a few words."""
    parallel = config.parallel
    if parallel.engine == "deepspeed":
        offload = f", {parallel.offload} in host memory" if parallel.offload != "none" else ""
        return f"DeepSpeed ZeRO {parallel.zero_stage}{offload}"
    return f"FSDP2 {grid.replicate} x {grid.shard}, tensor parallel {grid.tensor}"
