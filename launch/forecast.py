"""How much disk, GPU memory and time a run will take, and how much of each source: known before it starts, so what
cannot be is refused before it queues."""

from __future__ import annotations

import math
import os
import shutil
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from drover.launch.plan import Job
from drover.model.config import ModelConfig
from drover.pipeline.config.batch import BatchPlan, with_largest
from drover.pipeline.config.checks import vocabulary_size
from drover.pipeline.config.optimizers import optimizer_kind
from drover.pipeline.config.phases import PhasePlan
from drover.pipeline.config.training import TrainConfig
from drover.pipeline.config.tree import Config
from drover.pipeline.contract.run import Run
from drover.pipeline.contract.stages import STAGES
from drover.pipeline.core.errors import UserError
from drover.pipeline.parallel.stages import largest_share
from drover.pipeline.storage.object_files import InputFile, ObjectFile

if TYPE_CHECKING:
    from drover.pipeline.data.sampling.consumption import Consumption

WEIGHT_BYTES = 4
"""Of a parameter in a checkpoint and in training: its fp32 value; as much again for its gradient. What the optimizer
keeps comes on top."""
EXPORT_BYTES = {"float32": 4, "bfloat16": 2}
TOKENS_PER_BYTE = 0.3
"""Of text, at most, for a trained vocabulary: what token shards take is this times the bytes of a token."""

SIZE = 1024
"""Rows and columns of the matrices that are multiplied: 2 GFLOP, some 10 ms on two cores."""
LOOK_S = 0.1
"""The look is over after so long, however slow the machine is."""
EFFICIENCY = (1.0, 0.4)
"""Training's share of that speed on CPUs: at best (bfloat16, a faster library than NumPy's), and with small matrices,
two ranks or a slow memory. Measured on the demo: 1.0 in bfloat16, 0.7 in float32 under AVX2 (benchmarks/RESULTS.md)."""
STAGE_S, MEGABYTE_S = 4.0, 0.2
"""Seconds that a stage takes beside training's steps, and that shard, tokenizer and encode take for each MB of the
corpus, on a fast core."""
SLOWER = 2.0
"""How much longer that may take on another."""


@dataclass(frozen=True)
class Disk:
    """Bytes that the planned stages will write, and the free ones where they go. What is not known is not counted."""

    needed: int
    free: int
    parts: dict[str, int]


def shape_of(config: Config) -> ModelConfig | None:
    """The network with its vocabulary, or None as long as that is not known, or the network cannot be."""
    vocabulary = config.model.vocab_size or vocabulary_size(config)
    if vocabulary is None or config.model.problems():
        return None
    return config.model.model_copy(update={"vocab_size": vocabulary})


def optimizer_bytes(config: Config) -> float | None:
    """Bytes of the optimizer's state over all parameters, or None as long as the vocabulary is not known."""
    shape = shape_of(config)
    if shape is None:
        return None
    matrices = shape.matmul_parameter_count - (shape.vocab_size or 0) * shape.dim  # those of the blocks
    return optimizer_kind(config.train.optimizer).state_bytes(matrices, shape.parameter_count - matrices)


def planned_consumption(run: Run) -> Consumption | None:
    """What training will consume of each source, where its settings say so and encode has counted the tokens. What a
    packing makes of the tokens is known once training has planned it."""
    train, made = run.config.train, run.manifest("encode")
    if not says_consumption(train) or train.packing != "concatenate" or made is None or "splits" not in made.counts:
        return None
    from drover.pipeline.data.sampling.consumption import planned, train_tokens

    return planned(run.config, train_tokens(run.config, made.counts))


def says_consumption(train: TrainConfig) -> bool:
    """Whether there are phases, a mixture or a limit, so that a user wants to know what each source gives."""
    return bool(train.phases) or train.mixture is not None or train.max_epochs is not None


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
    shape, states, kept = shape_of(config), optimizer_bytes(config), kept_checkpoints(config)
    if shape is not None and states is not None and "train" in running:
        parts[f"up to {kept} checkpoints"] = kept * math.ceil(shape.parameter_count * WEIGHT_BYTES + states)
    if shape is not None and "convert" in running:
        parts["the export"] = shape.parameter_count * EXPORT_BYTES[config.convert.dtype]
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
    shape, states, parallel = shape_of(config), optimizer_bytes(config), config.parallel
    if shape is None or states is None:
        return None
    count = shape.parameter_count
    if parallel.engine == "fsdp2":
        sharers, width = ranks // (parallel.sizes(ranks).replicate * parallel.pp), _width(config)
        spread = (2 * WEIGHT_BYTES * count + states) / sharers
        if parallel.pp == 1:
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
        return sum(_size(path) for _, path in STAGES["shard"].input_files(config))
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


def matrix_rate(cores: int, look_s: float = LOOK_S) -> float:
    """FLOP/s of `cores` cores in float32 products, without importing torch.

    By processor time, which other programs on the machine change little: what it can do, not what is left of it now.
    """
    import numpy as np

    left = np.full((SIZE, SIZE), 0.5, dtype=np.float32)
    best, began = 0.0, time.perf_counter()
    while not best or time.perf_counter() - began < look_s:
        start = time.process_time()  # of all threads together
        left @ left
        best = max(best, 2 * SIZE**3 / max(1e-9, time.process_time() - start))
    return best * cores


def training_flops(config: Config) -> float | None:
    """Floating-point operations of the whole training, or None as long as the vocabulary is not known."""
    shape = shape_of(config)
    return None if shape is None else sum(
        phase.tokens * shape.flops_per_token(phase.train.sequence_length, causal=False)
        for phase in PhasePlan.of(config.train).phases)


def estimate(config: Config, jobs: list[Job], rate: float) -> tuple[float, float, float, float] | None:
    """Seconds from..to of all that is to run, and from..to of the training in it, where matrices are multiplied at
    `rate` FLOP/s.

    None where nothing is to be trained from its beginning, or not enough is known of it. A range is wide on purpose: a
    factor of two between its ends is what shapes, ranks and memory make of equal matrix speeds. Once training runs, its
    progress line knows better.
    """
    running = [job for job in jobs if job.to_run]
    begins = any(job.stage == "train" and (job.forced or job.state.kind not in ("partial", "stale")) for job in running)
    flops = training_flops(config)
    if not begins or flops is None:
        return None
    low, high = (flops / (rate * share) for share in EFFICIENCY)
    readers = sum(job.stage in ("shard", "tokenizer", "encode") for job in running)
    others = STAGE_S * len(running) + MEGABYTE_S * readers * corpus_bytes(config) / 1e6
    return low + others, high + SLOWER * others, low, high
