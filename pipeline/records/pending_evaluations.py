"""Checkpoints that are owed an evaluation beside training: they are kept until they have its result."""

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
    """What says that a checkpoint was evaluated."""
    return evaluation_folder(run_folder, step) / "evaluate" / MANIFEST


def is_owed(run_folder: Path, config: Config, step: int) -> bool:
    """Whether `launch.evaluate.every_checkpoints` asks for a result of the checkpoint after `step`, and there is none.
    That of the last step is evaluated by the chain itself."""
    every = (config.launch.evaluate.every_checkpoints or 0) * config.train.checkpoint.every_steps
    return bool(every and 0 < step < config.train.steps and step % every == 0
                and not evaluation_record(run_folder, step).exists())


def pending_evaluations(run_folder: Path, config: Config) -> Callable[[int], bool]:
    """Tells of a step whether its checkpoint waits for a result. None does where nobody will evaluate them: outside of
    Slurm's jobs."""
    submitted = "DROVER_CHAIN" in os.environ and "DROVER_LAUNCHED" not in os.environ
    return partial(is_owed, run_folder, config) if submitted else lambda step: False
