"""The record of a stage's start: a file until the stage is done, then a part of its manifest."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from drover.pipeline.contract.manifest import ExternalFiles, Identity, read_manifest
from drover.pipeline.core.errors import UserError
from drover.pipeline.core.files import read_record, typed, write_sealed

STARTED = "started.json"
AGAIN = "Run the stage with --force to start from scratch."


@dataclass(frozen=True)
class StartRecord:
    """How a stage was started.

    Attributes:
        fingerprint, accepted, files: as in its manifest.
        chain: the chain of jobs (`StageJob`) that last started it; None outside of a chain.
        force_id: the last `--force-id` with which it was started; None if there was none.
        unusable: whether it refused its input, so that its finished tasks are of no use with another one.
    """

    fingerprint: Identity
    at: str = ""
    accepted: list[str] = field(default_factory=list)
    files: ExternalFiles = field(default_factory=list)
    force_id: str | None = None
    chain: str | None = None
    unusable: bool = False

    def write(self, folder: Path) -> None:
        """Write it into a stage's folder."""
        write_sealed(folder / STARTED, asdict(self))


def read_start(folder: Path) -> StartRecord | None:
    """The start record of the stage in `folder`; None if it was not started; UserError if it is damaged."""
    if (started := read_record(folder / STARTED, StartRecord, AGAIN)) is not None:
        return started
    manifest = read_manifest(folder)
    try:
        return typed(manifest.start, StartRecord) if manifest is not None and manifest.start else None
    except ValueError as error:
        raise UserError(f"The manifest in {folder} is damaged: {error}. {AGAIN}") from None


def start_or_empty(folder: Path) -> StartRecord:
    """The start record; an empty one if there is none, or if it is damaged: `--force` then starts from scratch."""
    try:
        return read_start(folder) or StartRecord({})
    except UserError:
        return StartRecord({})


def change_start(folder: Path, **changes: Any) -> None:
    """Change values of the start record of an unfinished stage."""
    if (folder / STARTED).exists() and (started := read_start(folder)) and \
            (changed := replace(started, **changes)) != started:
        changed.write(folder)


def restore_start(folder: Path) -> None:
    """Write the start record of a finished stage as a file again, before its manifest is removed."""
    if not (folder / STARTED).exists() and (started := read_start(folder)):
        started.write(folder)
