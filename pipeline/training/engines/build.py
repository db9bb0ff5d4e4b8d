"""The choice of the configured engine."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from drover.model.attention.backend import Where
from drover.model.config import ModelConfig
from drover.pipeline.config.tree import Config
from drover.pipeline.core.errors import UserError
from drover.pipeline.parallel.attention import choose_attention, choose_flash
from drover.pipeline.parallel.compiling import compiles, refuse_without_compiler
from drover.pipeline.parallel.fp8 import refuse_without_fp8
from drover.pipeline.parallel.grid import Grid
from drover.pipeline.parallel.initial_values import InitialValues
from drover.pipeline.parallel.stages import stage_layers
from drover.pipeline.training.engines.engine import Engine
from drover.pipeline.training.optimizers.build import build_elementwise, build_optimizer

ZBV_TORCH = "2.13"
"""The first version of torch whose ZBV schedule supports autograd functions with their own backward pass."""


def build_engine(config: Config, model: ModelConfig, grid: Grid, precision: torch.dtype, accumulation: int,
                 initial: InitialValues | None) -> Engine:
    """The configured engine with a model and its initial weights; None leaves them to a checkpoint.

    precision: the element type of `config.train.precision`, which must be decided (not `auto`).
    """
    train = config.train
    parallel = config.parallel
    device = grid.ranks.device
    assert model.vocab_size is not None
    if model.vocab_size % parallel.tp:
        raise UserError(f"The vocabulary has {model.vocab_size} words, which parallel.tp ({parallel.tp}) does not "
                        f"divide. Set model.vocab_size to a multiple (ids beyond the tokenizer's are never used), or "
                        f"another parallel.tp.")
    if parallel.pp > 1 and parallel.pp_schedule == "zbv" and torch.__version__ < ZBV_TORCH:
        raise UserError(f"parallel.pp_schedule=zbv needs torch {ZBV_TORCH}: torch {torch.__version__} cannot split "
                        f"the backward passes of these blocks. Use 1f1b or interleaved.")
    refuse_without_compiler(train, device)
    refuse_without_fp8(config, device)
    where = Where(device, precision, compiles(train, device, parallel), model.head_width,
                  model.sliding_window is not None, grid.context > 1)
    attention, flash = choose_attention(train.attention, where), choose_flash(train.flash, device)
    backend = attention.backend
    if grid.context > 1:
        from drover.pipeline.parallel.context_parallel import ContextParallel
        backend = ContextParallel(backend, grid.mesh["context"])
    engine: Engine
    if parallel.engine == "deepspeed":
        from drover.pipeline.training.engines.zero import ZeroEngine
        engine = ZeroEngine(model, initial, grid.ranks, precision, config, accumulation, backend,
                            lambda placed: build_elementwise(placed, config, grid, model.tied_embeddings))
    else:
        from drover.pipeline.parallel.fsdp import parallelize
        from drover.pipeline.training.engines.fsdp import FsdpEngine
        place: Any = partial(parallelize, model, initial, grid, precision, train, parallel, backend)
        kind = FsdpEngine
        if grid.pipeline > 1:
            from drover.model.llama import ModelPart
            from drover.pipeline.parallel.pipeline_parallel import PipelinedModel
            from drover.pipeline.training.engines.pipelined import PipelineEngine
            layers = stage_layers(model, parallel.stages)
            numbers = parallel.stages_of(grid.pipeline_rank)
            placed: Any = PipelinedModel([place(ModelPart(layers[number], model.layers)) for number in numbers], grid,
                                         parallel, precision)
            kind = PipelineEngine
        else:
            placed = place()
        engine = kind(placed, build_optimizer(placed, config, grid, model.tied_embeddings), grid, config)
    # Under context parallelism `part_of` already marks a whole sequence as one document.
    engine.across_documents = train.across_documents and grid.context == 1
    engine.attention = attention
    engine.flash = flash
    engine.windowed = where.windowed
    return engine
