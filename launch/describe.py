"""The plan as a person reads it before anything starts."""

from __future__ import annotations

import shlex
import sys

from launch.plan import Job, Options
from pipeline.config.checks import vocabulary_size
from pipeline.config.tree import Config
from pipeline.run import Run

WIDTH = 100
CHECKPOINT_BYTES = 12
"""Of a parameter in a checkpoint: its fp32 value and AdamW's two moments."""
EXPORT_BYTES = {"float32": 4, "bfloat16": 2}


def print_plan(config: Config, run: Run, jobs: list[Job], options: Options, where: str) -> None:
    """Print the run folder, a row per stage, and what follows from the settings of train."""
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False, markup=False, emoji=False, width=None if sys.stdout.isatty() else WIDTH)
    print(f"run       {run.folder}")
    print(f"cluster   {options.cluster} ({where})")
    if options.cluster == "slurm":
        memory = f"{config.launch.memory_gb} GB a node" if config.launch.memory_gb else "the site's default memory"
        print(f"limits    {config.launch.time_minutes} min a job, {memory}")
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for heading in ("stage", "state", "resources"):
        table.add_column(heading, overflow="fold")
    for job in jobs:
        table.add_row(job.stage, state_text(job), resources(job, options) if job.to_run else "-")
    with console.capture() as captured:
        console.print(table)
    print("\n" + "\n".join(line.rstrip() for line in captured.get().splitlines()))
    if any(job.stage == "train" for job in jobs):
        train = next(job for job in jobs if job.stage == "train")
        print("\n" + "\n".join(training_facts(config, train.ranks)))
    print(flush=True)


def state_text(job: Job) -> str:
    """The state in a few words, and that it will not count if the stage is rebuilt."""
    return f"rebuild (now {job.state.kind})" if job.forced else str(job.state)


def resources(job: Job, options: Options) -> str:
    """Processes, threads, GPUs and, on Slurm, the part of each node that is asked for."""
    if job.ranks:
        text = f"{_count(job.ranks, 'rank')} x {_count(job.cpus_per_task, 'thread')}"
    else:
        text = _count(job.processes, "process")
    if options.cluster == "local":
        return text + (", 1 GPU each" if job.ranks and options.machine.gpus else "")
    gpus = f"{_count(job.gpus_per_node, 'GPU')} and " if job.gpus_per_node else ""
    return f"{text} on {_count(job.nodes, 'node')} of {gpus}{_count(job.tasks_per_node * job.cpus_per_task, 'core')}"


def training_facts(config: Config, ranks: int) -> list[str]:
    """What the settings of train amount to: tokens, sequences, accumulation, parameters, disk."""
    train, model = config.train, config.model
    sequences = train.batch_tokens // train.sequence_length
    lines = [f"batch     {train.batch_tokens:,} tokens a step = {sequences} sequences of {train.sequence_length}"]
    if sequences % (train.micro_batch * ranks) == 0:
        lines[0] += (f" = {_count(ranks, 'rank')} x micro batch {train.micro_batch} x "
                     f"{sequences // (train.micro_batch * ranks)} accumulated")
    lines.append(f"length    {train.steps:,} steps = {train.steps * train.batch_tokens:,} tokens")
    shape = f"{model.layers} layers, width {model.dim}, {model.heads} heads ({model.kv_heads} kv)"
    vocabulary = model.vocab_size or vocabulary_size(config)
    if vocabulary is None or model.problems():
        return [*lines, f"model     {shape}; parameters are known once the tokenizer is"]
    parameters = model.model_copy(update={"vocab_size": vocabulary}).parameter_count
    lines.append(f"model     {parameters:,} parameters: {shape}, vocabulary {vocabulary:,}")
    kept = train.checkpoint.keep + 1  # a new one is whole before an old one goes
    if train.checkpoint.permanent_every:
        kept += train.steps // train.checkpoint.permanent_every
    size = parameters * (CHECKPOINT_BYTES * kept + EXPORT_BYTES[config.convert.dtype])
    lines.append(f"disk      about {_bytes(size)} for up to {kept} checkpoints and the export, besides the data")
    return lines


def by_hand(job: Job) -> str:
    """The job's command as a line for a shell."""
    settings = [f"{key}={shlex.quote(value)}" for key, value in job.environment.items()]
    return " ".join([*settings, shlex.join(job.command)])


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}{'es' if noun.endswith('s') else 's'}"


def _bytes(size: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if size >= 10 or unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"
