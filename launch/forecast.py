"""Estimates of disk and GPU memory, and of how much a run reads of each source. Known before it starts, they let the
launcher refuse what does not fit."""

from __future__ import annotations

import math
import os
import shutil
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import TYPE_CHECKING

from drover.launch.plan import Job
from drover.model.config import ModelConfig
from drover.pipeline.config.batch import BatchPlan, with_largest
from drover.pipeline.config.checks import network, vocabulary_size
from drover.pipeline.config.optimizers import optimizer_kind
from drover.pipeline.config.tree import Config
from drover.pipeline.contract.external_inputs import listed_files
from drover.pipeline.contract.run import Run
from drover.pipeline.contract.stages import STAGES
from drover.pipeline.core.errors import UserError
from drover.pipeline.parallel.stages import largest_share

if TYPE_CHECKING:
    from drover.pipeline.data.sampling.consumption import Consumption

WEIGHT_BYTES = 4
"""Bytes of a parameter's fp32 value, in a checkpoint and in training. A gradient takes as much again; the optimizer's
state comes on top."""
EXPORT_BYTES = {"float32": 4, "bfloat16": 2}
TOKENS_PER_BYTE = 0.3
"""The most tokens per byte of text with a trained vocabulary."""
UNPACKED = {".gz": 3, ".zst": 3, ".parquet": 2}
"""Estimates of the bytes of text in a byte of such a file. English text and Python code have 2.8 to 4.1 in the first
two, 1.7 to 3.5 in Parquet."""


@dataclass(frozen=True)
class Disk:
    """Bytes that the planned stages will write, by kind in `parts`, and the bytes free there. What is unknown is not
    counted. text: bytes of the sources' files, if these are to be read and are all that is; 0: unknown."""

    needed: int
    free: int
    parts: dict[str, int]
    text: int


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
    """The most checkpoints on disk at one time. A new one is complete before an old one is removed."""
    train, permanent = config.train, config.train.checkpoint.permanent_every
    uploading = 0 if train.checkpoint.copy_to is None else 2  # one in progress, and one that waits
    averaged = sum(1 for step in config.convert.average if permanent is None or step % permanent)
    return train.checkpoint.keep + 1 + uploading + (train.steps // permanent if permanent else 0) + averaged


def disk(config: Config, jobs: list[Job]) -> Disk:
    """What the jobs that will run write under the run folder, less what they have already written."""
    running = {job.stage for job in jobs if job.to_run}
    parts: dict[str, int] = {}
    text, packed = corpus_bytes(config) if running & {"shard", "encode"} else (0, False)
    if "shard" in running:
        parts["text shards and their staging" + ", an estimate for packed input" * packed] = 2 * text
    if "encode" in running:
        bytes_per_token = 4 if (vocabulary_size(config) or 0) > 65536 or config.encode.dtype == "uint32" else 2
        parts["token shards"] = int(text * TOKENS_PER_BYTE * bytes_per_token)
    shape, states, kept = shape_of(config), optimizer_bytes(config), kept_checkpoints(config)
    if shape is not None and states is not None and "train" in running:
        parts[f"up to {kept} checkpoints"] = kept * math.ceil(shape.parameter_count * WEIGHT_BYTES + states)
    if shape is not None and "convert" in running:
        parts["the export"] = shape.parameter_count * EXPORT_BYTES[config.convert.dtype]
    folder = config.folder.absolute()
    there = next(path for path in (folder, *folder.parents) if path.exists())
    written = sum(_size(folder / stage) for stage in running)
    known = text if all(source.kind != "hf" for source in config.shard.sources) else 0
    return Disk(max(0, sum(parts.values()) - written), shutil.disk_usage(there).free, parts, known)


def state_bytes_per_rank(config: Config, ranks: int) -> int | None:
    """The least bytes of weights, gradients and optimizer state on a rank, without activations.

    FSDP2 holds all in fp32, sharded over dp_shard x cp x tp ranks. parallel.reduce=last adds gradients that are sharded
    over tp only, and parallel.reshard=never the all-gathered weights. With pipeline parallelism a step holds both, for
    all stages of a rank, and torch keeps buffers for each micro-batch's hidden states and their gradients; the rank
    with the most weights counts.
    ZeRO shards the fp32 master weights and the state over all ranks (on the GPU unless offloaded), gradients from stage
    2 on, and weights, which are in bf16, from stage 3 on.
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
    """Numbers in torch's buffers for hidden states and their gradients in a pipeline: of every micro-batch, for every
    stage of a rank."""
    parallel = config.parallel
    batch = BatchPlan.of(with_largest(config, ranks).train, parallel, ranks)
    tokens = batch.micro_batch * batch.sequence_length // (parallel.cp * parallel.tp)
    return 2 * (parallel.stages // parallel.pp) * batch.accumulation * tokens * config.model.dim


def _width(config: Config) -> int:
    """Bytes of a number in the computing precision; bf16 if none is chosen."""
    return {"fp32": 4, "fp64": 8}.get(config.train.precision, 2)


def gathered_bytes_per_layer(config: Config, ranks: int) -> int:
    """Bytes of the keys and values that context parallelism all-gathers on each rank for a layer, in the computing
    precision; bf16 if none is chosen."""
    model, batch = config.model, BatchPlan.of(with_largest(config, ranks).train, config.parallel, ranks)
    kv_heads = model.kv_heads // config.parallel.tp
    return 2 * batch.micro_batch * batch.sequence_length * kv_heads * model.head_width * _width(config)


def corpus_bytes(config: Config) -> tuple[int, bool]:
    """Bytes of the sources' files, and whether these are an estimate because some are packed. The sizes of Hub data
    sets are unknown before they are read."""
    text, packed = 0, False
    with suppress(UserError):  # a missing file: another check refuses it
        for file in listed_files(STAGES["shard"].input_files(config, "unit_files")):
            factor = UNPACKED.get(PurePath(file["path"]).suffix.lower(), 1)
            text += factor * file["bytes"]
            packed |= factor > 1
    return text, packed


def _size(folder: Path) -> int:
    total = 0
    for root, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):  # a temporary file that is gone
                total += Path(root, name).stat().st_size
    return total
