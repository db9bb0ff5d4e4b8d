"""The record of a stage's start, which stands for its manifest until there is one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pipeline.errors import UserError
from pipeline.files import read_json

STARTED = "started.json"


def begun_by(folder: Path) -> str | None:
    """The chain of jobs (`DROVER_CHAIN`) that has last begun the stage in `folder`; None outside of one."""
    try:
        found: str | None = read_json(folder / STARTED).get("chain")
        return found
    except (OSError, ValueError, AttributeError):
        return None


def force_id(folder: Path) -> str | None:
    """What the last `--force-id` that the stage in `folder` was begun under said; None if there was none."""
    try:
        found: str | None = read_json(folder / STARTED).get("force_id")
        return found
    except (FileNotFoundError, ValueError, AttributeError):  # not begun, or torn: whoever forces it starts it afresh
        return None


def read_start(folder: Path) -> dict[str, Any]:
    """The start record of a stage, {} if it was not begun."""
    try:
        record: dict[str, Any] = read_json(folder / STARTED)
        return record if record["fingerprint"] else {}
    except FileNotFoundError:
        return {}
    except (ValueError, KeyError, TypeError):
        raise UserError(f"{folder / STARTED} is damaged. Run the stage with --force to start it afresh.") from None
