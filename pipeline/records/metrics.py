"""The record of training, a JSON object a line: train/metrics.jsonl, and beside it samples.jsonl and events.jsonl."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pipeline.files import read_lines


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """The records of a run's train/metrics.jsonl, one per step, in order: what to plot or compute with.

    The file only grows. After a kill training goes on from its last checkpoint and does the steps since then again, and
    a rollback does some again on other samples, so a step may have several lines: its last one counts, the others are
    of updates that are in no checkpoint. A last line that a kill left torn is passed over.

    Args:
        path: the file; one that does not exist holds no step.

    Returns:
        Dictionaries with `step` (from 1), `loss` (nats per target token), `lr`, `grad_norm`, `tokens_per_s`,
        `samples` ([first, end) of the order), ...; a number that JSON cannot hold (NaN) stands as text.

    Raises:
        ValueError: a line within the file is no JSON: it is damaged.
    """
    return [record for _, record in sorted({record["step"]: record for record in read_lines(Path(path))}.items())]
