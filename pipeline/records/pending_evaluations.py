"""Checkpoints that are owed an evaluation beside training: they are kept until they have its result."""

from __future__ import annotations

import os
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


class PendingEvaluations:
    """Which checkpoints of the run in `run_folder` wait for a result of `launch.evaluate.every_checkpoints`.

    None, where nobody will evaluate them: outside of Slurm's jobs.
    """

    def __init__(self, run_folder: Path, config: Config) -> None:
        submitted = "DROVER_CHAIN" in os.environ and "DROVER_LAUNCHED" not in os.environ
        every = config.launch.evaluate.every_checkpoints if submitted else None
        self.run_folder, self.last = run_folder, config.train.steps
        self.every_steps = every and every * config.train.checkpoint.every_steps

    def __call__(self, step: int) -> bool:
        """Whether the checkpoint after `step` waits."""
        return bool(self.every_steps and 0 < step < self.last and step % self.every_steps == 0
                    and not evaluation_record(self.run_folder, step).exists())
