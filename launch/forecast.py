"""How much disk and GPU memory a run will take: known before it starts, so refused before it queues."""

from __future__ import annotations

import math
import os
import shutil
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from launch.plan import Job
from model.config import ModelConfig
from pipeline.config.batch import BatchPlan, with_largest
from pipeline.config.checks import vocabulary_size
from pipeline.config.optimizers import optimizer_kind
from pipeline.config.tree import Config
from pipeline.contract.stages import STAGES
from pipeline.errors import UserError
from pipeline.parallel.stages import largest_share
from pipeline.stores.object_files import InputFile, ObjectFile

WEIGHT_BYTES = 4
"""Of a parameter in a checkpoint and in training: its fp32 value; as much again for its gradient. What the optimizer
keeps comes on top."""
EXPORT_BYTES = {"float32": 4, "bfloat16": 2}
TOKENS_PER_BYTE = 0.3
"""Of text, at most, for a trained vocabulary: what token shards take is this times the bytes of a token."""


@dataclass(frozen=True)
class Disk:
    """Bytes that the planned stages will write, and the free ones where they go. What is not known is not counted."""

    needed: int
    free: int
    parts: dict[str, int]


def shape_of(config: Config) -> ModelConfig | None:
    """The network with its vocabulary, or None as long as that is not known."""
    vocabulary = config.model.vocab_size or vocabulary_size(config)
    return None if vocabulary is None else config.model.model_copy(update={"vocab_size": vocabulary})


def parameters(config: Config) -> int | None:
    """Parameters of the model, or None as long as the vocabulary is not known."""
    shape = shape_of(config)
    return None if shape is None or config.model.problems() else shape.parameter_count


def optimizer_bytes(config: Config) -> float | None:
    """Bytes of the optimizer's state over all parameters, or None as long as the vocabulary is not known."""
    count, shape = parameters(config), shape_of(config)
    if count is None or shape is None or shape.vocab_size is None:
        return None
    matrices = shape.matmul_parameter_count - shape.vocab_size * shape.dim  # those of the blocks
    return optimizer_kind(config.train.optimizer).state_bytes(matrices, count - matrices)


def kept_checkpoints(config: Config) -> int:
    """The most checkpoints that there are at one time; a new one is whole before an old one goes."""
    train, evaluated = config.train, config.launch.evaluate.every_checkpoints
    permanent = train.checkpoint.permanent_every
    owed = train.steps // (evaluated * train.checkpoint.every_steps) if evaluated else 0  # should their jobs not start
    copied = 0 if train.checkpoint.copy_to is None else 2  # one that is being copied, and one that waits for it
    averaged = sum(1 for step in config.convert.average if permanent is None or step % permanent)
    return train.checkpoint.keep + 1 + copied + (train.steps // permanent if permanent else 0) + averaged + owed


def disk(config: Config, jobs: list[Job]) -> Disk:
    """What the jobs that are to run will write under the run's folder, less what of it is there already."""
    running = {job.stage for job in jobs if job.to_run}
    parts: dict[str, int] = {}
    if "shard" in running:
        parts["text shards and their staging"] = 2 * corpus_bytes(config)
    if "encode" in running:
        bytes_per_token = 4 if (vocabulary_size(config) or 0) > 65536 or config.encode.dtype == "uint32" else 2
        parts["token shards"] = int(corpus_bytes(config) * TOKENS_PER_BYTE * bytes_per_token)
    count, states = parameters(config), optimizer_bytes(config)
    if count is not None and states is not None and "train" in running:
        parts[f"up to {kept_checkpoints(config)} checkpoints"] = kept_checkpoints(config) * math.ceil(
            count * WEIGHT_BYTES + states)
    if count is not None and "convert" in running:
        parts["the export"] = count * EXPORT_BYTES[config.convert.dtype]
    folder = config.folder.absolute()
    there = next(path for path in (folder, *folder.parents) if path.exists())
    written = sum(_size(folder / stage) for stage in running)
    return Disk(max(0, sum(parts.values()) - written), shutil.disk_usage(there).free, parts)


def state_bytes_per_rank(config: Config, ranks: int) -> int | None:
    """Bytes of weights, gradients and the optimizer's state that each rank holds at least, activations not counted.

    FSDP2 holds all in fp32, split over dp_shard x cp x tp ranks; with parallel.reduce=last, gradients over tp only
    besides, and with parallel.reshard=never the gathered weights. In a pipeline a step has both these and the gathered
    weights of all of a rank's stages, and torch keeps room for each micro-batch's hidden states and their gradients;
    the rank with most weights is meant.
    Under ZeRO the fp32 master and state are split over all ranks (on the GPU unless offloaded), gradients from stage 2
    on, weights from stage 3 on; those are in bf16.
    """
    count, states, parallel = parameters(config), optimizer_bytes(config), config.parallel
    if count is None or states is None:
        return None
    if parallel.engine == "fsdp2":
        sharers, width = ranks // (parallel.sizes(ranks).replicate * parallel.pp), _width(config)
        spread = (2 * WEIGHT_BYTES * count + states) / sharers
        shape = shape_of(config)
        if parallel.pp == 1 or shape is None:
            gathered = width if parallel.reshard == "never" and sharers > parallel.tp else 0
            whole = gathered + (WEIGHT_BYTES if parallel.reduce == "last" else 0)
            return math.ceil(spread + whole * count / parallel.tp)
        in_steps = largest_share(shape, parallel) * (spread + (WEIGHT_BYTES + width) * count / parallel.tp)
        return math.ceil(in_steps + _received(config, ranks) * width)
    master = 0 if parallel.offload != "none" else (WEIGHT_BYTES * count + states) / ranks
    gradients = 4 * count / (ranks if parallel.zero_stage >= 2 else 1)
    weights = 0 if parallel.offload == "params" else 2 * count / (ranks if parallel.zero_stage == 3 else 1)
    return math.ceil(master + gradients + weights)


def _received(config: Config, ranks: int) -> int:
    """Numbers in the hidden states and their gradients for which torch keeps room in a pipeline: of every micro-batch,
    for every stage of a rank."""
    parallel = config.parallel
    batch = BatchPlan.of(with_largest(config, ranks).train, parallel, ranks)
    tokens = batch.micro_batch * batch.sequence_length // (parallel.cp * parallel.tp)
    return 2 * (parallel.stages // parallel.pp) * batch.accumulation * tokens * config.model.dim


def _width(config: Config) -> int:
    """Bytes of a number in the computing precision; where it is not chosen, bf16 is meant."""
    return {"fp32": 4, "fp64": 8}.get(config.train.precision, 2)


def gathered_bytes_per_layer(config: Config, ranks: int) -> int:
    """Bytes of the keys and values that context parallelism gathers on each rank for a layer, in the computing
    precision; where it is not chosen, bf16 is meant."""
    model, batch = config.model, BatchPlan.of(with_largest(config, ranks).train, config.parallel, ranks)
    kv_heads = model.kv_heads // config.parallel.tp
    return 2 * batch.micro_batch * batch.sequence_length * kv_heads * model.head_width * _width(config)


def corpus_bytes(config: Config) -> int:
    """Bytes of the input files; of Hub data sets nothing is known before they are read."""
    try:
        return sum(_size(path) for _, path in STAGES["shard"].all_input_files(config))
    except UserError:  # not there: another check says so
        return 0


def _size(path: InputFile) -> int:
    if isinstance(path, ObjectFile):
        return path.size
    total = 0
    for file in (Path(root) / name for root, _, names in os.walk(path) for name in names) if path.is_dir() else [path]:
        with suppress(OSError):  # gone meanwhile, or never there: another check says so
            total += file.stat().st_size
    return total
