"""The scores of a training's checkpoints: which are to be measured, and the record of each.

    train/scores/step-00001000.json         what `drover evaluate` measured of the checkpoint after 1,000 steps
    train/scores/measured/                  the single results, each written when it is measured

Training keeps a checkpoint until it was scored, and gives its scores to the loggers; status and report read them. A
record states the content of its checkpoint. If training replaces the checkpoint, it is measured again.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from drover.pipeline.core.files import Record, read_record, sha256_file
from drover.pipeline.records.checkpoints import (
    CHECKPOINTS,
    MARKER,
    SCORES,
    checkpoint_name,
    complete_checkpoints,
    step_of,
)

if TYPE_CHECKING:
    from drover.pipeline.contract.run import Run

FORMAT = 1
ADVICE = "Delete it and give the command `drover evaluate` again."
SCORED = "scored"
"""The event of training that has a checkpoint's scores."""


@dataclass(frozen=True)
class CheckpointScores:
    """The scores of the checkpoint after `step` optimizer steps.

    checkpoint: a hash of its marker, which has those of its files. tokens, flops: trained on and computed so far, the
    latter unknown for training in phases. The others are as in results.json, with None for baselines.
    """

    step: int
    checkpoint: str
    tokens: int
    flops: float | None
    validation: Record
    tasks: Record
    groups: Record = field(default_factory=dict)
    suites: Record = field(default_factory=dict)
    format: int = FORMAT


def scores_path(train: Path, step: int) -> Path:
    """The record of the checkpoint after `step` steps."""
    return train / SCORES / f"{checkpoint_name(step)}.json"


def read_scores(train: Path) -> list[CheckpointScores]:
    """The scores of all checkpoints, in the order of steps; UserError for a damaged record."""
    records = [read_record(path, CheckpointScores, ADVICE, FORMAT)
               for path in sorted((train / SCORES).glob("step-*.json"))]
    return [record for record in records if record is not None]


def digest_of(checkpoint: Path) -> str:
    """A hash of a complete checkpoint's marker, which has the hashes of its files; "" without a marker."""
    with suppress(FileNotFoundError):
        return sha256_file(checkpoint / MARKER)
    return ""


def is_scored(train: Path, step: int) -> bool:
    """Whether the checkpoint after `step` steps was scored as it is now, or was scored and is being removed."""
    record = read_record(scores_path(train, step), CheckpointScores, ADVICE, FORMAT)
    return record is not None and digest_of(train / CHECKPOINTS / checkpoint_name(step)) in (record.checkpoint, "")


def unscored(run: Run) -> list[Path]:
    """The run's complete checkpoints that are due, at multiples of `evaluate.every` steps, and have to be scored."""
    every, train = run.config.evaluate.every, run.own_folder("train")
    return [path for path in complete_checkpoints(train)
            if every and step_of(path) % every == 0 and not is_scored(train, step_of(path))]


def all_scored(run: Run | None) -> bool:
    """Whether training is done, and no checkpoint has to be scored. False for a run that cannot be read."""
    return run is not None and run.manifest("train") is not None and not unscored(run)
