"""Rehearses a training step with the job's ranks before the job queues, so that a job that cannot fit is refused within
a minute. This runs `drover rehearse` as a process of its own: the launcher needs no torch, and no failure there stops
the submission."""

from __future__ import annotations

import os
import subprocess
import sys

from drover.launch.plan import Job, Options
from drover.launch.processes import answer_of
from drover.pipeline.config.checks import network
from drover.pipeline.config.kinds import plugin_folders
from drover.pipeline.config.tree import Config
from drover.pipeline.contract.run import Run
from drover.pipeline.contract.stages import IMPORTED_FROM
from drover.pipeline.core.console import say
from drover.pipeline.core.errors import UserError

LIMIT_S = 300.0
"""If a rehearsal takes longer (in seconds), the job is submitted without its result."""
FIT = "memory     "
"""The beginning of the line that says whether the step fits."""


def worth_rehearsing(config: Config, jobs: list[Job]) -> bool:
    """Whether a job will train on GPUs of several nodes, with an engine that can be rehearsed."""
    train = _training(jobs)
    return train is not None and train.gpus_per_node > 0 and train.nodes > 1 and config.parallel.engine == "fsdp2"


def rehearse_training(run: Run, jobs: list[Job], options: Options) -> None:
    """Rehearse a training step of these jobs, and print the memory it takes.

    Raises:
        UserError: it does not fit the GPUs' memory (`launch.gpu_memory_gb`).
    """
    train = _training(jobs)
    if train is None:
        return say("rehearsal", "not done: there is no training to submit")
    say("rehearsal", "computing the memory of a training step without GPUs (--no-rehearse skips this) ...")
    arguments = ["--config", options.config_path, "--ranks", str(train.ranks)]
    if not train.gpus_per_node:
        arguments.append("--cpu")
    elif memory := run.config.launch.gpu_memory_gb:
        arguments.append(f"--memory={memory:g}")
    arguments += options.overrides
    made = run.manifest("tokenizer")
    if made is not None and network(run.config).vocab_size is None:
        arguments.append(f"model.vocab_size={made.counts['vocab_size']}")
    status, output, errors = _rehearse(arguments)
    lines = output.splitlines()
    fit = next((line for line in lines if line.startswith(FIT)), "")
    if status and not fit:
        cause = (errors.strip().splitlines() or [f"it ended with status {status}"])[-1]
        return say("rehearsal", f"not done: {cause}. The job is submitted anyway")
    for line in lines:
        say("rehearsal", line)
    if status:
        raise UserError(f"Training does not fit: {fit.removeprefix(FIT).strip()} --no-rehearse submits it "
                        f"anyway.")


def _training(jobs: list[Job]) -> Job | None:
    return next((job for job in jobs if job.stage == "train" and job.to_run and job.ranks), None)


def _rehearse(arguments: list[str]) -> tuple[int, str, str]:
    """Exit status, output and errors of `drover rehearse`."""
    path = filter(None, [str(IMPORTED_FROM), *plugin_folders(), os.environ.get("PYTHONPATH")])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path), "PYTHONSAFEPATH": "1", "OMP_NUM_THREADS": "1",
                   "CUDA_VISIBLE_DEVICES": ""}
    try:
        return answer_of([sys.executable, "-m", "drover", "rehearse", *arguments], environment, LIMIT_S)
    except subprocess.TimeoutExpired:
        return 2, "", f"it took longer than {LIMIT_S:.0f} s"
