"""The scores of a training's checkpoints: which are to be measured, and the record of each.

    train/scores/step-00001000.json         what `drover evaluate` measured of the checkpoint after 1,000 steps
    train/scores/measured/                  the single results, each written when it is measured

Training keeps a checkpoint until it was scored, and gives its scores to the loggers; status and report read them. A
record states the content of its checkpoint. If training replaces the checkpoint, it is measured again.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypedDict

from drover.pipeline.core.files import read_record, sha256_file, write_sealed
from drover.pipeline.evaluation.scores import Score
from drover.pipeline.records.checkpoints import (
    CHECKPOINTS,
    MARKER,
    SCORES,
    checkpoint_name,
    complete_checkpoints,
    step_of,
)

FORMAT = 1
ADVICE = "Delete it and give the command `drover evaluate` again."
SCORED = "scored"
"""The event of training that has a checkpoint's scores."""


class TaskScores(TypedDict):
    """As in `TaskResult`."""

    metrics: dict[str, Score]
    items: int
    chance: float | None
    answer_bits_per_byte: float | None


@dataclass(frozen=True)
class CheckpointScores:
    """The scores of the checkpoint after `step` optimizer steps.

    checkpoint: a hash of its marker, which has those of its files. inputs: a hash of all that decided the scores.
    tokens, flops: trained on and computed so far. bits_per_byte: of the validation text of each source, and of all
    under "". tasks: by name.
    """

    step: int
    checkpoint: str
    inputs: str
    tokens: int
    flops: float
    bits_per_byte: dict[str, float | None]
    tasks: dict[str, TaskScores]
    format: int = FORMAT

    def write(self, train: Path) -> None:
        """Write the record into the train stage's folder, atomically."""
        write_sealed(scores_path(train, self.step), asdict(self))

    @property
    def identity(self) -> tuple[int, str]:
        """Step and content of the checkpoint."""
        return self.step, self.checkpoint

    @property
    def figures(self) -> dict[str, dict[str, float | None]]:
        """The scores that loggers draw, as fields of a step's record."""
        return {"validation_text_bpb": self.bits_per_byte,
                "task_scores": {f"{name}/{metric}": entry["value"] for name, task in self.tasks.items()
                                for metric, entry in task["metrics"].items()}}


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


def is_scored(train: Path, step: int, inputs: str | None = None) -> bool:
    """Whether the checkpoint after `step` steps was scored as it is now, or was scored and is being removed.
    inputs: and with these inputs; None: any."""
    record = read_record(scores_path(train, step), CheckpointScores, ADVICE, FORMAT)
    return record is not None and inputs in (None, record.inputs) and digest_of(
        train / CHECKPOINTS / checkpoint_name(step)) in (record.checkpoint, "")


def due(train: Path, every: int) -> list[Path]:
    """The complete checkpoints at multiples of `every` steps, oldest first."""
    return [path for path in complete_checkpoints(train) if step_of(path) % every == 0]
