"""The first weights of a model: what one rank of a layout draws, which is drawn here."""

from __future__ import annotations

import time

import torch

from model.config import ModelConfig
from pipeline.formats.huggingface import parameter_shapes
from pipeline.parallel.initial_values import drawn
from tools.at_scale.layouts import held_by_fsdp


def measure(model: ModelConfig, ranks: int, tensor: int, replicate: int) -> str:
    """A line of figures, of a rank in the middle: not the first rows of blocks."""
    held, initial, rank = held_by_fsdp(model, ranks, tensor, replicate), drawn(model, 1), ranks // 2
    began, processor, values = time.perf_counter(), time.process_time(), 0
    for name, shape in parameter_shapes(model).items():
        offset, size = held(rank, name)
        values += initial(name, shape, offset, size).numel()
    seconds, processor_s = time.perf_counter() - began, time.process_time() - processor
    return (f"tensor {tensor}, replicate {replicate}, {ranks:,} ranks: rank {rank} draws {values:,} values in "
            f"{seconds:.2f} s, of processor time {processor_s:.2f} s, with {torch.get_num_threads()} threads")
