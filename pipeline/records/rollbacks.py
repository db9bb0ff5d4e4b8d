"""The rollbacks of a run: which samples were left out for good, and why. Stored next to the checkpoints, not in them.

A rollback returns to a checkpoint that has no record of it. So the samples that it leaves out are first written to
`train/rollbacks.json`. A restart from any checkpoint then leaves out the same samples and makes the same batches.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from drover.pipeline.core.files import read_record, write_sealed
from drover.pipeline.data.exclusion import Excluded, Range, format_ranges
from drover.pipeline.records.metrics import Line

ROLLBACKS = "rollbacks.json"


@dataclass(frozen=True)
class Rollback:
    """One rollback: from `step` (counted from 1) to the checkpoint after `back_to` steps.

    samples: what that step would have trained on, left out from now on. plan_sha256: the order that gives the numbers
    their meaning; for training in phases, up to the phase of the samples. Under another plan they exclude nothing. why:
    the spike, in a sentence.
    """

    step: int
    back_to: int
    samples: tuple[Range, ...]
    plan_sha256: str
    why: str


@dataclass(frozen=True)
class Rollbacks:
    """The content of the file, oldest first."""

    rollbacks: tuple[Rollback, ...]


def read_rollbacks(folder: Path) -> list[Rollback]:
    """The rollbacks of the train stage in `folder`, oldest first."""
    result = read_record(folder / ROLLBACKS, Rollbacks, "Put it back from a copy of the run.")
    return list(result.rollbacks) if result else []


def add_rollback(folder: Path, rollback: Rollback) -> None:
    """Record a rollback durably. To be called by one rank, before anything is loaded."""
    write_sealed(folder / ROLLBACKS, asdict(Rollbacks((*read_rollbacks(folder), rollback))))


def excluded_by(rollbacks: Sequence[Rollback], links: Collection[str]) -> Excluded:
    """The samples that these rollbacks leave out of an order. links: its hashes, one per phase."""
    return Excluded(part for rollback in rollbacks if rollback.plan_sha256 in links for part in rollback.samples)


def no_longer_left_out(rollbacks: Sequence[Rollback], links: Collection[str]) -> list[str]:
    """A message for each rollback that leaves nothing out of the order whose hashes are `links`."""
    return [f"samples {format_ranges(rollback.samples)}, left out by the rollback from step {rollback.step}, were in a "
            f"phase that has changed. These numbers are other text now, so they are no longer left out"
            for rollback in rollbacks if rollback.plan_sha256 not in links]


def is_abandoned(line: Line, rollbacks: Sequence[Rollback], links: Collection[str]) -> bool:
    """Whether a line is of a step that a later rollback undid, and that will see other samples."""
    later = excluded_by(rollbacks[line.get("rollbacks", 0):], links).ranges
    return bool(later) and line["samples"][1] > later[0][0]
