"""Tasks that are done once, the ledger of finished tasks, and the shares of several jobs.

A task has a name and a key. The key is a hash of everything that decides the task's result. A task is finished when the
ledger has its record under this key. A stage's units, the results of an evaluation and the parts of an export are
tasks.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from drover.pipeline.core.console import Say
from drover.pipeline.core.errors import UserError
from drover.pipeline.core.files import Ledger as Ledger
from drover.pipeline.core.files import Record, problems_of, sha256_json

UNITS = "units"
PARTS = Path(UNITS) / "parts"
UnitFunction = Callable[[Path, Any], Record]
"""(the stage's folder, a unit's payload) -> the unit's record."""
T = TypeVar("T")


@dataclass(frozen=True)
class Unit:
    """A task of a stage: a readable name, and the argument of its function."""

    name: str
    payload: Any


def unit_keys(identity: Record, phase: str, units: Iterable[Unit]) -> dict[str, str]:
    """The key of each unit: a hash of the stage's identity, the phase and the payload."""
    before = sha256_json([dict(identity), phase])  # hashed once, because it may name a million files
    return {unit.name: sha256_json([before, unit.payload]) for unit in units}


def with_outputs(records: dict[str, Record], folder: Path, say: Say) -> dict[str, Record]:
    """The records whose `outputs` exist in the stage's folder and have their recorded sizes."""
    outputs = [(name, output) for name, record in records.items() for output in record.get("outputs", [])]
    problems = problems_of(folder, [output for _, output in outputs])
    lost = {name: problem for (name, _), problem in zip(outputs, problems, strict=True) if problem}
    for problem in lost.values():
        say(f"{problem}: making it again")
    return {name: record for name, record in records.items() if name not in lost}


def finished_units(stage_folder: Path) -> int:
    """How many finished units of all phases are recorded in a stage's folder."""
    return sum(len({name for name, _, _ in Ledger(folder).lines()})
               for folder in (stage_folder / UNITS).glob("*") if folder != stage_folder / PARTS)


@dataclass(frozen=True)
class Part:
    """One of `count` shares of a phase's units; `index` counts from 0."""

    index: int
    count: int
    phase: str

    @classmethod
    def parse(cls, text: str, phase: str) -> Part:
        """Parse `I/N`; UserError if the text has another form."""
        found = re.fullmatch(r"([0-9]{1,9})/([0-9]{1,9})", text)
        part = cls(int(found[1]), int(found[2]), phase) if found else cls(0, 0, phase)
        if not part.index < part.count:
            raise UserError(f"--part {text} is not a part. Give I/N, for example --part 0/4. I counts from 0 and is "
                            f"less than N.")
        return part

    def __str__(self) -> str:
        return f"{self.index}/{self.count}"

    @property
    def tag(self) -> str:
        """For file names: `0-of-4`."""
        return f"{self.index}-of-{self.count}"

    def of(self, units: Sequence[T]) -> Sequence[T]:
        """Every count-th unit. Neighbours have similar sizes, so the shares have, too."""
        return units[self.index::self.count]

    @property
    def word(self) -> str:
        """Name of the file in `PARTS` with the status of this share (`drover.pipeline.contract.state`)."""
        return f"{self.phase}.{self.tag}.state.json"

    def mark(self, folder: Path, key: str, facts: Record) -> None:
        """Record in a stage's folder that this share is done. key: a hash of the stage's fingerprint."""
        Ledger(folder / PARTS).add(f"{self.phase}.{self.tag}", key, facts)

    def is_marked(self, folder: Path) -> bool:
        """Whether the share is done, under any identity."""
        return self.index in marked_parts(folder, self.count, self.phase)


class ShareDone(Exception):  # noqa: N818 - not an error: it leaves the stage's body before the work for all units
    """A part of a stage has done its share of the units."""


def marked_parts(folder: Path, count: int, phase: str, key: str | None = None) -> set[int]:
    """Which of `count` parts of a phase of the stage in `folder` are done; with `key`, only under this identity."""
    pattern = re.compile(rf"{re.escape(phase)}\.([0-9]+)-of-{count}")
    return {int(found[1]) for name, own, _ in Ledger(folder / PARTS).lines()
            if key in (None, own) and (found := pattern.fullmatch(name))}
