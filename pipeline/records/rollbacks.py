"""The rollbacks of a run: which samples were left out for good, and why. Kept beside the checkpoints, not in them.

A rollback goes to a checkpoint that knows nothing of it, so what it leaves out is written to `train/rollbacks.json`
first. Whatever checkpoint a restart finds then, it leaves out the same samples and makes the same batches.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from drover.pipeline.core.files import read_record, write_sealed
from drover.pipeline.data.exclusion import Excluded, Range, spelled

ROLLBACKS = "rollbacks.json"


@dataclass(frozen=True)
class Rollback:
    """One rollback: from `step` (counted from 1) to the checkpoint after `back_to` steps.

    samples: what that step would have trained on, left out from now on. plan_sha256: the order in which the numbers
    mean something, of training in phases as far as the samples' own; under another plan they exclude nothing. why: the
    spike, in a sentence.
    """

    step: int
    back_to: int
    samples: tuple[Range, ...]
    plan_sha256: str
    why: str


@dataclass(frozen=True)
class Rollbacks:
    """What the file holds, the oldest first."""

    rollbacks: tuple[Rollback, ...]


def read_rollbacks(folder: Path) -> list[Rollback]:
    """The rollbacks of the train stage in `folder`, oldest first."""
    found = read_record(folder / ROLLBACKS, Rollbacks, "Put it back from a copy of the run.")
    return list(found.rollbacks) if found else []


def add_rollback(folder: Path, rollback: Rollback) -> None:
    """Make a rollback count, durably; to be called by one rank, before anything is loaded."""
    write_sealed(folder / ROLLBACKS, asdict(Rollbacks((*read_rollbacks(folder), rollback))))


def excluded_by(rollbacks: Sequence[Rollback], links: Collection[str]) -> Excluded:
    """The samples that these rollbacks leave out of the order whose hashes are `links`, one a phase."""
    return Excluded(part for rollback in rollbacks if rollback.plan_sha256 in links for part in rollback.samples)


def no_longer_left_out(rollbacks: Sequence[Rollback], links: Collection[str]) -> list[str]:
    """What to say of rollbacks that leave nothing out of the order whose hashes are `links`."""
    return [f"samples {spelled(rollback.samples)}, left out by the rollback from step {rollback.step}, were of a phase "
            f"that is otherwise now, in which these numbers are other text: they are left out no more"
            for rollback in rollbacks if rollback.plan_sha256 not in links]


def is_abandoned(record: dict[str, Any], rollbacks: Sequence[Rollback], links: Collection[str]) -> bool:
    """Whether a line of metrics.jsonl is of a step that a later rollback undid and that will see other samples."""
    later = excluded_by(rollbacks[record.get("rollbacks", 0):], links).ranges
    return bool(later) and record["samples"][1] > later[0][0]
