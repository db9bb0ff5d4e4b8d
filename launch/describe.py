"""The plan, for a person to read before anything starts, with estimates of disk, memory, and what is read of sources.
The launcher refuses what does not fit."""

from __future__ import annotations

import math
import shlex
import shutil
from contextlib import suppress
from dataclasses import dataclass
from itertools import starmap
from pathlib import Path
from typing import TYPE_CHECKING

from drover.launch.plan import Job, Options, code_path
from drover.model.config import ModelConfig
from drover.pipeline.config.checks import network, rank_problems
from drover.pipeline.config.optimizers import optimizer_kind
from drover.pipeline.config.phases import BatchPlan, PhasePlan
from drover.pipeline.config.tree import Config
from drover.pipeline.contract.run import Run, acceptable
from drover.pipeline.contract.stages import before
from drover.pipeline.core.console import counted, draw, duration, readable, table
from drover.pipeline.core.errors import UserError
from drover.pipeline.core.files import problems_of
from drover.pipeline.parallel.stages import largest_share
from drover.pipeline.records.checkpoints import Marker, complete_checkpoints, step_of, valid_marker
from drover.pipeline.records.metrics import TrainingRecords, reordered

if TYPE_CHECKING:
    from drover.pipeline.data.sampling.consumption import Consumption

COLUMNS = ("job", "state", "work", "nodes", "of a node", "time", "where", "after")
OF_THE_ORDER = ("config.seed", "config.train.mixture", "config.train.sequence_length", "inputs.encode")
WEIGHT_BYTES = 4
"""Bytes of a parameter's fp32 value, in a checkpoint and in training. A gradient takes as much again; the optimizer's
state comes on top."""


@dataclass(frozen=True)
class Disk:
    """Estimate of the bytes that the planned stages write, without those that they have written, and the bytes free
    there. What is unknown is not counted. parts: what they write, in words."""

    needed: int
    free: int
    parts: str


def print_plan(run: Run, jobs: list[Job], options: Options, where: str, disk: Disk) -> None:
    """Print the run folder, one row per job, and what the settings of train amount to."""
    draw(f"run       {run.folder}", f"cluster   {options.cluster} ({where})", *reuse_lines(run))
    draw("", table([COLUMNS, *(_row(run, job, options) for job in jobs)]))
    if train := next((job for job in jobs if job.stage == "train"), None):
        state = train.state
        continues = not train.forced and (state.kind == "resumable" or (
            state.kind == "changed" and options.accept_changes and acceptable("train", state.differences)))
        draw("", *training_facts(run.config, train), *(continued_from(run) if continues else ()),
             *consumption_lines(run), *(order_warning(run, train) if continues else ()))
    if disk.needed:
        draw(f"disk      about {readable(disk.needed)} of {readable(disk.free)} free ({disk.parts})")
    draw("")


def reuse_lines(run: Run) -> list[str]:
    """Which run's stages are reused, and whether it is not where `reuse` says."""
    reuse = run.config.reuse
    if run.reused is None or reuse is None:
        return []
    moved = "" if (Path(reuse) / "config.yaml").is_file() else f", because {reuse} holds no run"
    return [f"reuse     {run.reused.folder}{moved}"]


def _row(run: Run, job: Job, options: Options) -> list[str]:
    """A job's row of the table: its processes, and on Slurm also what it requests."""
    state = job.state.kind if job.state.kind == "absent" else str(job.state)  # the last column says what it waits for
    if job.forced:
        state = f"rebuild (now {job.state.kind})"
    elif job.state.kind == "done" and run.is_reused(job.stage):
        state = "reused"
    if not job.to_run:
        return [job.stage, state, *[""] * len(COLUMNS[2:])]
    work = (f"{counted(job.ranks, 'rank')} x {counted(job.cpus_per_task, 'thread')}" if job.ranks else
            f"{job.processes} process{'es' * (job.processes > 1)}")
    after = ", ".join(job.dependencies)
    if options.cluster == "local":
        work += ", 1 GPU each" * bool(job.ranks and options.machine.gpus)
        return [job.stage, state, work, "", "", "", "", after]
    nodes = f"{job.nodes}{f' + {job.spare_nodes} spare' if job.spare_nodes else ''}"
    nodes += f", {len(job.elements)} elements" if job.elements else ""
    extra = job.resources.extra or {}
    where = [job.resources.partition, extra.get("qos"), extra.get("constraint")]
    share = [counted(job.tasks_per_node * job.cpus_per_task, "core"),
             counted(job.gpus_per_node, "GPU") if job.gpus_per_node else "",
             "all memory" if job.resources.mem == "0" else job.resources.mem]
    return [job.stage, state, work, nodes, ", ".join(filter(None, share)), duration(60 * job.minutes),
            ", ".join(str(part) for part in where if part), after]


def training_facts(config: Config, job: Job) -> list[str]:
    """What the settings of train amount to: tokens, sequences, gradient accumulation, parameters, memory."""
    train, model, ranks = config.train, config.model, job.ranks
    # Finished training is shown too, and need not fit today's ranks.
    fits, known, plan = not rank_problems(config, ranks), shape_of(config), PhasePlan.of(train)
    lines = [f"batch     {BatchPlan.of(phase.train, config.parallel, ranks)}"
             f"{f' (phase {phase.number + 1})' if plan.declared else ''}" for phase in plan.phases] if fits else []
    shape = f"{model.layers} layers, width {model.dim}, {model.heads} heads ({model.kv_heads} kv)"
    lines += [f"length    {train.steps:,} steps = {plan.tokens:,} tokens",
              f"model     {known.parameter_count:,} parameters: {shape}" if known else
              f"model     {shape}; parameters are known once the tokenizer is",
              *[f"start     from the weights in {train.init_from}"] * (train.init_from is not None)]
    if fits and (state := state_bytes_per_rank(config, ranks)):
        lines.append(f"memory    {readable(state)} a rank for weights, gradients and optimizer state; activations come "
                     f"on top")
    return lines


def newest_checkpoint(run: Run) -> tuple[Path, Marker] | None:
    """The newest checkpoint of training whose files all have their sizes, if there is one."""
    for path in reversed(complete_checkpoints(run.own_folder("train"))):
        if (marker := valid_marker(path)) and not any(problems_of(path, marker.files)):
            return path, marker
    return None


def continued_from(run: Run) -> list[str]:
    """After which step training would continue; [] without a checkpoint."""
    if (newest := newest_checkpoint(run)) is None:
        return []
    path, marker = newest
    batch = run.config.train.batch_tokens
    other = marker.config.get("train", {}).get("batch_tokens", batch) != batch
    return [f"start     after step {step_of(path):,}, if its checkpoint is valid (sizes are compared here, hashes by "
            f"`drover verify {run.folder}`)",
            *["          its steps had another batch; length and data count all steps with this one"] * other]


def consumption_lines(run: Run) -> list[str]:
    """Tokens and epochs of each source in each phase; until the tokens are counted, only the phases. And a warning of
    each source that is repeated many times."""
    from drover.pipeline.data.sampling.consumption import many_epochs, plan_lines, repetition

    train, consumption = run.config.train, planned_consumption(run)
    if consumption is not None and train.packing == "concatenate":
        lines = plan_lines(train, consumption)
    else:
        when = "encode is done" if train.packing == "concatenate" else "training has planned the packing"
        lines = [*(str(phase) for phase in PhasePlan.of(train).phases if phase.own is not None),
                 f"tokens and epochs of each source are known once {when}"]
    if consumption is not None:
        lines += [f"warning: {text}" for text in starmap(repetition, many_epochs(train, consumption.epochs).items())]
    return [f"{'' if number else 'data':<9} {line}" for number, line in enumerate(lines)]


def order_warning(run: Run, train: Job) -> list[str]:
    """A warning if some steps so far had another order of samples than the present one."""
    from drover.pipeline.data.sampling.consumption import as_if

    steps = reordered(TrainingRecords(run.own_folder("train")).events)
    if any(change.key.startswith(OF_THE_ORDER) for change in train.state.differences) and (
            newest := newest_checkpoint(run)):
        steps.append(step_of(newest[0]))
    return [f"{'':<9} warning: {text}" for text in as_if(steps)]


def by_hand(job: Job) -> str:
    """The job's command as a line for a shell, with its container and the additional options of srun."""
    environment = {**job.environment, "PYTHONPATH": code_path(job.code)}
    settings = [f"{key}={shlex.quote(value)}" for key, value in environment.items()]
    step = ["srun", *job.srun_args] if job.srun_args else []
    return " ".join([*settings, shlex.join([*step, *job.wrap, *job.command])])


def planned_consumption(run: Run) -> Consumption | None:
    """What training will consume of each source, once encode has counted the tokens. An estimate for packed documents:
    training plans their packing later. None where encode or a stage before it has changed."""
    made = run.manifest("encode")
    if made is None or "splits" not in made.counts or any(map(run.changed, before(["train"]))):
        return None
    from drover.pipeline.data.sampling.consumption import planned, train_tokens

    # A source shorter than a sequence is refused here; packed, it is padded.
    with suppress(*(() if run.config.train.packing == "concatenate" else (UserError,))):
        return planned(run.config, train_tokens(run.config, made.counts))
    return None


def shape_of(config: Config) -> ModelConfig | None:
    """The network with its vocabulary; None while the vocabulary is unknown, or if the network is invalid."""
    known = network(config)
    return None if known.vocab_size is None or config.model.problems() else known


def optimizer_bytes(config: Config) -> float:
    """Bytes of the optimizer's state over all parameters; 0 while the vocabulary is unknown."""
    shape = shape_of(config)
    if shape is None:
        return 0
    matrices = shape.matmul_parameter_count - (shape.vocab_size or 0) * shape.dim  # those of the blocks
    return optimizer_kind(config.train.optimizer).state_bytes(matrices, shape.parameter_count - matrices)


def state_bytes_per_rank(config: Config, ranks: int) -> int:
    """The least bytes of weights, gradients and optimizer state on a rank, without activations; 0 while the vocabulary
    is unknown. `drover rehearse` counts all that a step takes.

    FSDP2 holds all in fp32, sharded over dp_shard x cp x tp ranks. parallel.reduce=last adds gradients that are sharded
    over tp only, and parallel.reshard=never the all-gathered weights. With pipeline parallelism a step holds both, for
    all stages of a rank; the rank with the most weights counts.
    ZeRO shards the fp32 master weights and the state over all ranks (on the GPU unless offloaded), gradients from stage
    2 on, and weights, which are in bf16, from stage 3 on.
    """
    shape, states, parallel = shape_of(config), optimizer_bytes(config), config.parallel
    if shape is None:
        return 0
    count = shape.parameter_count
    if parallel.engine == "fsdp2":
        sharers = ranks // (parallel.sizes(ranks).replicate * parallel.pp)
        width = {"fp32": 4, "fp64": 8}.get(config.train.precision, 2)
        pipelined = parallel.pp > 1
        gathered = width if pipelined or (parallel.reshard == "never" and sharers > parallel.tp) else 0
        if pipelined or parallel.reduce == "last":
            gathered += WEIGHT_BYTES
        total = (2 * WEIGHT_BYTES * count + states) / sharers + gathered * count / parallel.tp
        return math.ceil(total * largest_share(shape, parallel))
    master = 0 if parallel.offload != "none" else (WEIGHT_BYTES * count + states) / ranks
    gradients = WEIGHT_BYTES * count / (ranks if parallel.zero_stage >= 2 else 1)
    weights = 0 if parallel.offload == "params" else 2 * count / (ranks if parallel.zero_stage == 3 else 1)
    return math.ceil(master + gradients + weights)


def disk(config: Config, jobs: list[Job]) -> Disk:
    """What the jobs that will run write under the run folder besides the text and its tokens, whose sizes are known
    once filters and tokenizer have run. A new checkpoint is complete before an old one is removed."""
    running = {job.stage for job in jobs if job.to_run} & {"train", "convert"}
    parts = dict[str, int]()
    shape, checkpoint = shape_of(config), config.train.checkpoint
    if shape is not None and "train" in running:
        permanent = config.train.steps // checkpoint.permanent_every if checkpoint.permanent_every else 0
        kept = checkpoint.keep + 1 + permanent + len(config.convert.average)
        parts[f"up to {kept} checkpoints"] = kept * math.ceil(
            shape.parameter_count * WEIGHT_BYTES + optimizer_bytes(config))
    if shape is not None and "convert" in running:
        parts["the export"] = shape.parameter_count * (4 if config.convert.dtype == "float32" else 2)
    folder = config.folder.absolute()
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    written = 0
    with suppress(OSError):  # of a run that is at work, files may be removed meanwhile
        written = sum(path.stat().st_size for stage in running for path in (folder / stage).rglob("*"))
    return Disk(max(0, sum(parts.values()) - written), shutil.disk_usage(existing).free,
                ", ".join(f"{name} {readable(size)}" for name, size in parts.items()))
