"""Tasks that are done once, and the ledger of finished tasks.

A task has a name and a key. The key is a hash of everything that decides the task's result. A task is finished when the
ledger has its record under this key. A stage's tasks, the results of an evaluation and the parts of an export are
tasks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drover.pipeline.core.console import Say
from drover.pipeline.core.files import Ledger as Ledger
from drover.pipeline.core.files import Record, problems_of

TASKS = "units"
"""In a stage's folder: the ledgers of its passes (the name that format 1 gave it), and the claims."""
CLAIMS = f"{TASKS}/claims"
TaskFunction = Callable[[Path, Any], Record]
"""(the stage's folder, a task's payload) -> the task's record."""


@dataclass(frozen=True)
class Task:
    """A task of a stage: a readable name, and the argument of its function."""

    name: str
    payload: Any


def with_outputs(records: dict[str, Record], folder: Path, say: Say) -> dict[str, Record]:
    """The records whose `outputs` exist in the stage's folder and have their recorded sizes."""
    outputs = [(name, output) for name, record in records.items() for output in record.get("outputs", [])]
    problems = problems_of(folder, [output for _, output in outputs])
    lost = {name: problem for (name, _), problem in zip(outputs, problems, strict=True) if problem}
    for problem in lost.values():
        say(f"{problem}: making it again")
    return {name: record for name, record in records.items() if name not in lost}


def finished_tasks(stage_folder: Path) -> int:
    """How many finished tasks of all passes are recorded in a stage's folder."""
    return sum(len({name for name, _, _ in Ledger(folder).lines()}) for folder in (stage_folder / TASKS).glob("*"))
