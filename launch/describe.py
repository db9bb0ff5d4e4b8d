"""The plan, for a person to read before anything starts, with what will be read of sources."""

from __future__ import annotations

import shlex
from contextlib import suppress
from itertools import starmap
from pathlib import Path
from typing import TYPE_CHECKING

from drover.launch.plan import Job, Options, code_path
from drover.model.config import ModelConfig
from drover.pipeline.config.checks import network, rank_problems
from drover.pipeline.config.phases import BatchPlan, PhasePlan
from drover.pipeline.config.tree import Config
from drover.pipeline.contract.run import Run
from drover.pipeline.contract.stages import before
from drover.pipeline.core.console import counted, draw, duration, table
from drover.pipeline.core.errors import UserError
from drover.pipeline.core.files import problems_of
from drover.pipeline.records.checkpoints import Marker, complete_checkpoints, valid_marker

if TYPE_CHECKING:
    from drover.pipeline.data.sampling.consumption import Consumption

COLUMNS = ("job", "state", "work", "nodes", "of a node", "time", "where", "after")


def print_plan(run: Run, jobs: list[Job], options: Options, where: str) -> None:
    """Print the run folder, one row per job, and what the settings of train amount to."""
    draw(f"run       {run.folder}", f"cluster   {options.cluster} ({where})", *reuse_lines(run))
    draw("", table([COLUMNS, *(_row(run, job, options) for job in jobs)]))
    if train := next((job for job in jobs if job.stage == "train"), None):
        draw("", *training_facts(run.config, train), *consumption_lines(run))
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
    """What the settings of train amount to: tokens, sequences, gradient accumulation, parameters."""
    train, model, ranks = config.train, config.model, job.ranks
    # Finished training is shown too, and need not fit today's ranks.
    fits, known, plan = not rank_problems(config, ranks), shape_of(config), PhasePlan.of(train)
    lines = [f"batch     {BatchPlan.of(phase.train, config.parallel, ranks)}"
             f"{f' (phase {phase.number + 1})' if plan.declared else ''}" for phase in plan.phases] if fits else []
    shape = f"{model.layers} layers, width {model.dim}, {model.heads} heads ({model.kv_heads} kv)"
    return [*lines, f"length    {train.steps:,} steps = {plan.tokens:,} tokens",
            f"model     {known.parameter_count:,} parameters: {shape}" if known else
            f"model     {shape}; parameters are known once the tokenizer is",
            *[f"start     from the weights in {train.init_from}"] * (train.init_from is not None)]


def newest_checkpoint(run: Run) -> tuple[Path, Marker] | None:
    """The newest checkpoint of training whose files all have their sizes, if there is one."""
    for path in reversed(complete_checkpoints(run.own_folder("train"))):
        if (marker := valid_marker(path)) and not any(problems_of(path, marker.files)):
            return path, marker
    return None


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
