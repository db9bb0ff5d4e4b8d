"""Estimates of disk and GPU memory, and of how much a run reads of each source. Known before it starts, they let the
launcher refuse what does not fit."""

from __future__ import annotations

import math
import shutil
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from drover.launch.plan import Job
from drover.model.config import ModelConfig
from drover.pipeline.config.checks import network
from drover.pipeline.config.optimizers import optimizer_kind
from drover.pipeline.config.tree import Config
from drover.pipeline.contract.run import Run
from drover.pipeline.core.errors import UserError
from drover.pipeline.parallel.stages import largest_share

if TYPE_CHECKING:
    from drover.pipeline.data.sampling.consumption import Consumption

WEIGHT_BYTES = 4
"""Bytes of a parameter's fp32 value, in a checkpoint and in training. A gradient takes as much again; the optimizer's
state comes on top."""


@dataclass(frozen=True)
class Disk:
    """Estimate of the bytes that the planned stages write, by kind in `parts`, and the bytes free there. What is
    unknown is not counted."""

    needed: int
    free: int
    parts: dict[str, int]


def shape_of(config: Config) -> ModelConfig | None:
    """The network with its vocabulary; None while the vocabulary is unknown, or if the network is invalid."""
    known = network(config)
    return None if known.vocab_size is None or config.model.problems() else known


def optimizer_bytes(config: Config) -> float | None:
    """Bytes of the optimizer's state over all parameters; None while the vocabulary is unknown."""
    shape = shape_of(config)
    if shape is None:
        return None
    matrices = shape.matmul_parameter_count - (shape.vocab_size or 0) * shape.dim  # those of the blocks
    return optimizer_kind(config.train.optimizer).state_bytes(matrices, shape.parameter_count - matrices)


def planned_consumption(run: Run) -> Consumption | None:
    """What training will consume of each source, once encode has counted the tokens. An estimate for packed documents:
    training plans their packing later."""
    made = run.manifest("encode")
    if made is None or "splits" not in made.counts:
        return None
    from drover.pipeline.data.sampling.consumption import planned, train_tokens

    # A source shorter than a sequence is refused here; packed, it is padded.
    with suppress(*(() if run.config.train.packing == "concatenate" else (UserError,))):
        return planned(run.config, train_tokens(run.config, made.counts))
    return None


def kept_checkpoints(config: Config) -> int:
    """Checkpoints that are on disk at one time. A new one is complete before an old one is removed."""
    train = config.train
    permanent = train.checkpoint.permanent_every
    return train.checkpoint.keep + 1 + (train.steps // permanent if permanent else 0) + len(config.convert.average)


def disk(config: Config, jobs: list[Job]) -> Disk:
    """What the jobs that will run write under the run folder besides the text and its tokens, whose sizes are known
    once filters and tokenizer have run, less what they have already written."""
    running = {job.stage for job in jobs if job.to_run} & {"train", "convert"}
    parts: dict[str, int] = {}
    shape = shape_of(config)
    states = optimizer_bytes(config)
    kept = kept_checkpoints(config)
    if shape is not None and states is not None and "train" in running:
        parts[f"up to {kept} checkpoints"] = kept * math.ceil(shape.parameter_count * WEIGHT_BYTES + states)
    if shape is not None and "convert" in running:
        parts["the export"] = shape.parameter_count * (4 if config.convert.dtype == "float32" else 2)
    folder = config.folder.absolute()
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    written = 0
    with suppress(OSError):  # of a run that is at work, files may be removed meanwhile
        written = sum(path.stat().st_size for stage in running for path in (folder / stage).rglob("*"))
    return Disk(max(0, sum(parts.values()) - written), shutil.disk_usage(existing).free, parts)


def state_bytes_per_rank(config: Config, ranks: int) -> int | None:
    """The least bytes of weights, gradients and optimizer state on a rank, without activations; None while the
    vocabulary is unknown. `drover rehearse` counts all that a step takes.

    FSDP2 holds all in fp32, sharded over dp_shard x cp x tp ranks. parallel.reduce=last adds gradients that are sharded
    over tp only, and parallel.reshard=never the all-gathered weights. With pipeline parallelism a step holds both, for
    all stages of a rank; the rank with the most weights counts.
    ZeRO shards the fp32 master weights and the state over all ranks (on the GPU unless offloaded), gradients from stage
    2 on, and weights, which are in bf16, from stage 3 on.
    """
    shape, states, parallel = shape_of(config), optimizer_bytes(config), config.parallel
    if shape is None or states is None:
        return None
    count = shape.parameter_count
    if parallel.engine == "fsdp2":
        sharers = ranks // (parallel.sizes(ranks).replicate * parallel.pp)
        width = {"fp32": 4, "fp64": 8}.get(config.train.precision, 2)
        pipelined = parallel.pp > 1
        unsharded = width if pipelined or (parallel.reshard == "never" and sharers > parallel.tp) else 0
        if pipelined or parallel.reduce == "last":
            unsharded += WEIGHT_BYTES
        total = (2 * WEIGHT_BYTES * count + states) / sharers + unsharded * count / parallel.tp
        return math.ceil(total * (largest_share(shape, parallel) if pipelined else 1))
    master = 0 if parallel.offload != "none" else (WEIGHT_BYTES * count + states) / ranks
    gradients = 4 * count / (ranks if parallel.zero_stage >= 2 else 1)
    weights = 0 if parallel.offload == "params" else 2 * count / (ranks if parallel.zero_stage == 3 else 1)
    return math.ceil(master + gradients + weights)
