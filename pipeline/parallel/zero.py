"""DeepSpeed's ZeRO: its configuration, and its start on ranks that have already joined.

DeepSpeed controls neither launch nor schedule nor checkpoints: ranks come from our launcher, the learning rate from our
schedule, and checkpoints have the form that every engine reads.
"""

from __future__ import annotations

import logging
import os
from typing import Any

import torch

from drover.model.attention.backend import Backend
from drover.model.config import ModelConfig
from drover.model.llama import Llama
from drover.pipeline.config.training import ParallelConfig, TrainConfig
from drover.pipeline.core.errors import UserError, require
from drover.pipeline.parallel.blocks import checkpoint_activations, compile_blocks, compiles
from drover.pipeline.parallel.ranks import Ranks


def zero_config(parallel: ParallelConfig, train: TrainConfig, precision: torch.dtype, accumulation: int,
                on_gpu: bool) -> dict[str, object]:
    """DeepSpeed's configuration. Gradients are added and sent in float32: by default it would use bf16 for both."""
    where = {"device": "cpu", "pin_memory": on_gpu}
    zero: dict[str, object] = {"stage": parallel.zero_stage, "overlap_comm": on_gpu, "contiguous_gradients": True}
    if parallel.offload != "none":
        zero["offload_optimizer"] = where
    if parallel.offload == "params":
        zero["offload_param"] = where
    return {
        "train_micro_batch_size_per_gpu": 1,  # only for its counters; we choose the size of micro-batches
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": train.clip_norm, "zero_optimization": zero,
        "zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False,
        "bf16": {"enabled": True, "check_grad_overflow": True} if precision == torch.bfloat16 else {"enabled": False},
        "data_types": {"grad_accum_dtype": "fp32"}, "communication_data_type": "fp32",
        "steps_per_print": 2**31 - 1, "wall_clock_breakdown": False,
    }


def import_deepspeed(on_gpu: bool) -> Any:
    """The library, set up for GPUs or CPUs. Raises UserError if it is not installed or cannot be imported."""
    require("parallel.engine deepspeed", "deepspeed", "take parallel.engine=fsdp2")
    if not on_gpu:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    os.environ.setdefault("LOCAL_RANK", "0")  # a process started alone
    try:
        import deepspeed
    except ImportError as error:
        raise UserError(f"parallel.engine is 'deepspeed', but the package cannot be imported ({error}). Repair its "
                        f"installation, or take parallel.engine=fsdp2.") from error
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    if not on_gpu:
        # At the first start it would compile this with a C++ compiler, only for collectives of inference.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed


def spread_by_zero(config: ModelConfig, ranks: Ranks, precision: torch.dtype, train: TrainConfig,
                   parallel: ParallelConfig, accumulation: int, attention: Backend, make_optimizer: Any) -> Any:
    """DeepSpeed's engine around a model whose weights are undefined.

    attention: the backend inside documents. make_optimizer: makes the optimizer for DeepSpeed from the model.
    """
    on_gpu = ranks.device.type == "cuda"
    deepspeed = import_deepspeed(on_gpu)
    settings = zero_config(parallel, train, precision, accumulation, on_gpu)
    if parallel.zero_stage == 3:
        with deepspeed.zero.Init(config_dict_or_path=settings):  # given a dtype, it uses another (0.19.8)
            model = Llama(config)
    else:
        with torch.device("meta"):
            model = Llama(config)
        model.to_empty(device=ranks.device)
    model.backend = attention
    model.losses.z_loss = train.z_loss
    checkpoint_activations(model, train)
    if compiles(train, ranks.device, parallel):
        compile_blocks(model, train)
    deepspeed.init_distributed(dist_init_required=False)
    engine, *_ = deepspeed.initialize(model=model, optimizer=make_optimizer(model), config=settings,
                                      dist_init_required=False)
    return engine
