"""The layout of a training checkpoint on disk, and the marker that completes it.

    train/checkpoints/step-00000100/                  tensors and their index (pipeline/formats/sharded_tensors.py)
                      step-00000100/COMPLETE.json     written last: progress, files with sha256, how it was made
                      step-00000200.tmp/              being written, or left by a kill
                      step-00000300.damaged/          quarantined: its files are not what was written
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TypedDict

from drover.pipeline.contract.manifest import GitState
from drover.pipeline.core.errors import OtherVersionError, UserError
from drover.pipeline.core.files import Outputs, Record, read_record

CHECKPOINTS = "checkpoints"
"""In the train stage's folder."""
COPYING = "copying.json"
"""There, too, if checkpoints are copied to a store: which training the copies are of."""
SCORES = "scores"
"""There, too: what was measured of checkpoints (pipeline/records/checkpoint_scores.py)."""
MARKER = "COMPLETE.json"
FORMAT = 2
"""Version of the marker and of the checkpoint's files."""


@dataclass(frozen=True)
class TrainingProgress:
    """The progress of training, apart from weights and optimizer state.

    step: optimizer steps done. samples: sequences used; this is the whole state of the data order. plan_sha256: hash of
    that order. tokens, targets: trained on so far. restarts: how often training was started before. precision: of the
    arithmetic. updates: optimizer updates applied, i.e. `step` less the skipped ones. guards: the history on which they
    decide. hooks: what `Hook.state` returned, by the hook's name. record: the metrics of the last step, in case a kill
    kept them from the log.
    """

    step: int = 0
    samples: int = 0
    tokens: int = 0
    targets: int = 0
    restarts: int = 0
    plan_sha256: str = ""
    precision: str = ""
    updates: int = 0
    guards: Record = field(default_factory=dict)
    hooks: dict[str, Record] = field(default_factory=dict)
    record: Record | None = None


def checkpoint_name(step: int) -> str:
    """Name of the folder of the checkpoint after `step` optimizer steps, and of the record of its scores."""
    return f"step-{step:08d}"


def step_of(path: Path) -> int:
    """The step that a folder is named after; ValueError for other names."""
    return int(path.name.removeprefix("step-"))


def named_after_steps(folder: Path) -> list[Path]:
    """The entries of `folder` that are named after a step, in order; without unfinished and quarantined ones."""
    return sorted(folder.glob("step-" + 8 * "[0-9]"))


def complete_checkpoints(train: Path) -> list[Path]:
    """The checkpoints in the train stage's folder with a marker, oldest first."""
    return [path for path in named_after_steps(train / CHECKPOINTS) if (path / MARKER).is_file()]


def saved(train: Path) -> str:
    """What the train stage's folder has saved, in words; "" if a start from scratch would lose nothing."""
    if complete := complete_checkpoints(train):
        return f"step {step_of(complete[-1])}"
    left = (train / COPYING).exists() or any(path.suffix != ".tmp" for path in (train / CHECKPOINTS).glob("*"))
    return "its checkpoints are damaged or elsewhere" * left


def refuse_shorter(step: int, steps: int) -> None:
    """UserError if training has done more than the configured steps."""
    if step > steps:
        raise UserError(f"This run is at step {step} already, beyond train.steps {steps}. Set train.steps to at least "
                        f"{step}, or use name=<another>.")


class MarkedConfig(TypedDict, total=False):
    """Sections of the configuration that made a checkpoint."""

    model: dict[str, object]
    train: dict[str, object]


@dataclass(frozen=True)
class Marker:
    """A checkpoint's marker: its progress, the records of its files, and how it was made."""

    format: int
    progress: TrainingProgress
    files: Outputs
    config: MarkedConfig = field(default_factory=MarkedConfig)
    code: dict[str, str] = field(default_factory=dict)
    software: dict[str, object] = field(default_factory=dict)
    git: GitState = field(default_factory=GitState)
    world_size: int = 0


def read_marker(path: Path) -> Marker:
    """The marker of a checkpoint; UserError if the checkpoint is not complete."""
    marker = valid_marker(path)
    if marker is None:
        raise UserError(f"{path} is not a complete checkpoint: {MARKER} is missing or damaged. "
                        f"Run the train stage again; it continues from the newest complete one.")
    return marker


def valid_marker(path: Path) -> Marker | None:
    """The marker of a checkpoint, None if it is missing or damaged; UserError if it is of another version."""
    try:
        return read_record(path / MARKER, Marker, "Continue with the version that wrote it (COMPLETE.json has the "
                           "hashes of its code), or start again with --force, which renames it.", FORMAT)
    except OtherVersionError:
        raise
    except UserError:
        return None
