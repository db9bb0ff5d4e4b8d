"""Checkpoints with a pending evaluation during training: they are kept until they have its result."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

from drover.pipeline.config.tree import Config
from drover.pipeline.contract.manifest import MANIFEST
from drover.pipeline.contract.state import EVALUATIONS
from drover.pipeline.records.checkpoints import checkpoint_name


def evaluation_folder(run_folder: Path, step: int) -> Path:
    """The run folder of a checkpoint's evaluation."""
    return run_folder / EVALUATIONS / checkpoint_name(step)


def evaluation_record(run_folder: Path, step: int) -> Path:
    """The file that shows that a checkpoint was evaluated."""
    return evaluation_folder(run_folder, step) / "evaluate" / MANIFEST


def is_owed(run_folder: Path, config: Config, step: int) -> bool:
    """Whether `launch.evaluate.every_checkpoints` asks for a result of the checkpoint after `step`, and there is none
    yet. The chain itself evaluates the last step's."""
    every = (config.launch.evaluate.every_checkpoints or 0) * config.train.checkpoint.every_steps
    return bool(every and 0 < step < config.train.steps and step % every == 0
                and not evaluation_record(run_folder, step).exists())


def pending_evaluations(run_folder: Path, config: Config) -> Callable[[int], bool]:
    """A function that returns whether the checkpoint of a step waits for a result. It is always False outside of
    Slurm's jobs, where nobody would evaluate them."""
    submitted = "DROVER_CHAIN" in os.environ and "DROVER_LAUNCHED" not in os.environ
    return partial(is_owed, run_folder, config) if submitted else lambda step: False
