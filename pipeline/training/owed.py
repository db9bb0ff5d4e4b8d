"""Checkpoints that are owed an evaluation beside training: they are kept until they have its result."""

from __future__ import annotations

import os
from pathlib import Path

from pipeline.config.tree import Config
from pipeline.manifest import MANIFEST


class OwedEvaluations:
    """Which checkpoints of the run in `run_folder` wait for a result of `launch.evaluate.every_checkpoints`.

    None, where nobody will evaluate them: outside of a chain of jobs.
    """

    def __init__(self, run_folder: Path, config: Config) -> None:
        every = config.launch.evaluate.every_checkpoints if "DROVER_CHAIN" in os.environ else None
        self.folder, self.last = run_folder / "evaluations", config.train.steps
        self.every_steps = every and every * config.train.checkpoint.every_steps

    def __call__(self, step: int) -> bool:
        """Whether the checkpoint after `step` waits."""
        return bool(self.every_steps and 0 < step < self.last and step % self.every_steps == 0
                    and not (self.folder / f"step-{step:08d}" / "evaluate" / MANIFEST).exists())
