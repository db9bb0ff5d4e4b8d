"""The record of a stage's start, which stands for its manifest until there is one."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from drover.pipeline.contract.manifest import Drifts, Identity, OutsideFiles
from drover.pipeline.core.errors import UserError
from drover.pipeline.core.files import read_record, write_sealed

STARTED = "started.json"


@dataclass(frozen=True)
class StartRecord:
    """How a stage was begun.

    Attributes:
        fingerprint, drift, files: as in its manifest.
        chain: the chain of jobs (`DROVER_CHAIN`) that has last begun it; None outside of one.
        force_id: what the last `--force-id` that it was begun under said; None if there was none.
        failed: whether it refused what it was given: then it may start afresh if it has no finished units. unusable:
            also if it has some.
    """

    fingerprint: Identity
    at: str = ""
    drift: Drifts = field(default_factory=list)
    files: OutsideFiles = field(default_factory=list)
    force_id: str | None = None
    chain: str | None = None
    failed: bool = False
    unusable: bool = False

    def write(self, folder: Path) -> None:
        """Put it into a stage's folder."""
        write_sealed(folder / STARTED, asdict(self))


def read_start(folder: Path) -> StartRecord | None:
    """The start record of the stage in `folder`, None if it was not begun; UserError if it is damaged."""
    return read_record(folder / STARTED, StartRecord, "Run the stage with --force to start it afresh.")


def sound_start(folder: Path) -> StartRecord:
    """The start record; an empty one if there is none, or it is damaged: whoever forces the stage starts it afresh."""
    try:
        return read_start(folder) or StartRecord({})
    except UserError:
        return StartRecord({})


def change_start(folder: Path, **changes: Any) -> None:
    """Write the start record with other values, if there is one."""
    if (started := read_start(folder)) and (changed := replace(started, **changes)) != started:
        changed.write(folder)
