"""Prints the plan, for a person to read before anything starts."""

from __future__ import annotations

import shlex
from itertools import starmap

from drover.launch.forecast import (
    Disk,
    planned_consumption,
    shape_of,
    state_bytes_per_rank,
)
from drover.launch.plan import Job, Options, code_path
from drover.pipeline.config.checks import rank_problems
from drover.pipeline.config.phases import BatchPlan, PhasePlan
from drover.pipeline.config.tree import Config
from drover.pipeline.contract.run import Run
from drover.pipeline.core.console import aligned, counted, duration, echo, first, readable

SLURM_COLUMNS = ("job", "state", "nodes", "work", "cores", "GPUs", "memory", "time", "where", "after")
"""Cores, GPUs and memory are per node."""


def print_plan(run: Run, jobs: list[Job], options: Options, where: str, disk: Disk) -> None:
    """Print the run folder, one row per job, and what the settings of train amount to."""
    config = run.config
    echo(f"run       {run.folder}")
    echo(f"cluster   {options.cluster} ({where})")
    headings = SLURM_COLUMNS if options.cluster == "slurm" else ("stage", "state", "resources")
    echo("", *aligned([headings, *(row(job, options) for job in jobs)]))
    if train := next((job for job in jobs if job.stage == "train"), None):
        echo("\n" + "\n".join(training_facts(config, train) + consumption_lines(run)))
        if counts := train.node_counts[1:]:
            echo(f"nodes     if nodes fail, training can continue on {first([*map(str, counts)])} of "
                 f"{train.nodes} nodes")
    if disk.needed:
        echo(f"disk      about {readable(disk.needed)} of {readable(disk.free)} free:")
        echo("\n".join(f"          {readable(size):>7} {name}" for name, size in disk.parts.items() if size))
    echo()


def work(job: Job) -> str:
    """The job's processes and their threads, such as `2 ranks x 4 threads`."""
    if job.ranks:
        return f"{counted(job.ranks, 'rank')} x {counted(job.cpus_per_task, 'thread')}"
    return f"{job.processes} process{'es' * (job.processes > 1)}"


def row(job: Job, options: Options) -> tuple[str, ...]:
    """A job's row of the table: its processes, and on Slurm also what it requests."""
    slurm = options.cluster == "slurm"
    state = str(job.state)
    if job.forced:
        state = f"rebuild (now {job.state.kind})"
    elif slurm and job.state.kind == "absent":
        state = "absent"  # the last column says what it waits for
    if not job.to_run:
        return job.key, state, *([""] * (len(SLURM_COLUMNS) - 2) if slurm else ["-"])
    if not slurm:
        return job.key, state, work(job) + ", 1 GPU each" * bool(job.ranks and options.machine.gpus)
    resources = job.resources
    nodes = str(job.nodes)
    if job.spare_nodes:
        nodes += f" + {job.spare_nodes} spare"
    if job.elements:
        nodes += f", {len(job.elements)} elements"
    extra = resources.extra or {}
    where = [resources.partition, extra.get("qos"), extra.get("constraint"),
             f"link {job.link} of {job.links}" * (job.links > 1)]
    memory = "all" if resources.mem == "0" else resources.mem or ""
    return (job.key, state, nodes, work(job), str(job.tasks_per_node * job.cpus_per_task),
            str(job.gpus_per_node or ""), memory, duration(60 * job.minutes),
            ", ".join(str(part) for part in where if part) or "-", ", ".join(job.dependencies))


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
              f"model     {shape}; parameters are known once the tokenizer is"]
    if not known or not fits:
        return lines
    if state := state_bytes_per_rank(config, ranks):
        lines.append(f"memory    {readable(state)} a rank for weights, gradients and optimizer state; activations come "
                     f"on top")
    return lines


def consumption_lines(run: Run) -> list[str]:
    """Tokens and epochs of each source in each phase, if there are phases, a mixture or a limit; until the tokens are
    counted, only the phases. And a warning of each source that is repeated many times."""
    from drover.pipeline.data.sampling.consumption import many_epochs, plan_lines, repetition, says_consumption

    train, consumption = run.config.train, planned_consumption(run)
    lines = list[str]()
    if says_consumption(train) and consumption is not None and train.packing == "concatenate":
        lines += plan_lines(train, consumption)
    elif says_consumption(train):
        when = "encode is done" if train.packing == "concatenate" else "training has planned the packing"
        lines += [*(str(phase) for phase in PhasePlan.of(train).phases if phase.own is not None),
                  f"tokens and epochs of each source are known once {when}"]
    if consumption is not None:
        lines += starmap(repetition, many_epochs(train, consumption).items())
    return [f"{'' if number else 'data':<9} {line}" for number, line in enumerate(lines)]


def by_hand(job: Job) -> str:
    """The job's command as a line for a shell, with its container and the additional options of srun."""
    environment = {**job.environment, "PYTHONPATH": code_path(job.code)}
    settings = [f"{key}={shlex.quote(value)}" for key, value in environment.items()]
    step = ["srun", *job.srun_args] if job.srun_args else []
    return " ".join([*settings, shlex.join([*step, *job.wrap, *job.command])])
