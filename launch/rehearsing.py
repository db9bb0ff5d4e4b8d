"""Computes the memory of a training step with the job's ranks before the job queues, so that a job that cannot fit is
refused within a minute.

This runs in its own process: the launcher needs no torch, and no failure there stops the submission.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys

from drover.launch.plan import Job, Options
from drover.launch.processes import answer_of
from drover.pipeline.config.checks import network
from drover.pipeline.config.plugins import plugin_folders
from drover.pipeline.config.tree import Config
from drover.pipeline.contract.run import Run
from drover.pipeline.contract.stages import IMPORTED_FROM
from drover.pipeline.core.console import say
from drover.pipeline.core.errors import UserError
from drover.pipeline.core.files import Record

LIMIT_S = 300.0
"""If a rehearsal takes longer (in seconds), the job is submitted without its result."""


def worth_rehearsing(config: Config, jobs: list[Job]) -> bool:
    """Whether a job will train on GPUs of several nodes, with an engine that can be rehearsed."""
    train = _training(jobs)
    return train is not None and train.gpus_per_node > 0 and train.nodes > 1 and config.parallel.engine == "fsdp2"


def rehearse_training(run: Run, jobs: list[Job], given: Options) -> None:
    """Rehearse a training step of these jobs, and print the memory it takes.

    Raises:
        UserError: it does not fit the GPUs' memory (`launch.limits.gpu_memory_gb`), or cannot run.
    """
    config, train = run.config, _training(jobs)
    if train is None:
        return say("rehearsal", "not done: there is no training to submit")
    if importlib.util.find_spec("torch") is None:
        return say("rehearsal", "not done: torch is not installed here")
    made = run.manifest("tokenizer")
    words = network(config).with_vocabulary(made.counts["vocab_size"] if made else None).vocab_size
    if words is None:
        return say("rehearsal", "not done: the size of the vocabulary is unknown until the tokenizer is done "
                                "(model.vocab_size sets it)")
    say("rehearsal", "computing the memory of a training step without GPUs (--no-rehearse skips this) ...")
    request = {"config": given.config_path, "overrides": [*given.overrides, f"model.vocab_size={words}"],
               "ranks": train.ranks, "gpu": train.gpus_per_node > 0,
               "memory_gb": config.launch.limits.gpu_memory_gb if train.gpus_per_node else None}
    answer = _ask(request)
    if failed := answer.get("failed"):
        return say("rehearsal", f"not done: {failed}. The job is submitted anyway")
    if answer.get("refused"):
        raise UserError(f"A training step cannot run: {answer['refused']}\n--no-rehearse submits the job without this "
                        f"check.")
    for text in answer["lines"]:
        say("rehearsal", text)
    if not answer["fits"]:
        raise UserError(f"Training does not fit: {answer['verdict']} --no-rehearse submits it anyway.")


def _training(jobs: list[Job]) -> Job | None:
    return next((job for job in jobs if job.stage == "train" and job.to_run and job.ranks), None)


def _ask(request: Record) -> Record:
    """The answer of `drover.pipeline.rehearsal`; if there is none, the reason under `failed`."""
    path = filter(None, [str(IMPORTED_FROM), *plugin_folders(), os.environ.get("PYTHONPATH")])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path), "PYTHONSAFEPATH": "1", "OMP_NUM_THREADS": "1",
                   "CUDA_VISIBLE_DEVICES": ""}
    try:
        status, output, errors = answer_of([sys.executable, "-m", "drover.pipeline.rehearsal"], environment, LIMIT_S,
                                           json.dumps(request))
    except subprocess.TimeoutExpired:
        return {"failed": f"it took longer than {LIMIT_S:.0f} s"}
    try:
        answer: Record = json.loads(output.splitlines()[-1])
    except (IndexError, ValueError):
        last = (errors.strip().splitlines() or [f"it ended with status {status}"])[-1]
        return {"failed": f"it failed ({last})"}
    return answer
