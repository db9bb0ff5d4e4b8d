"""Shares of a stage's units: several jobs, on as many nodes, each do one; a plain run of the stage then finishes it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from drover.pipeline.errors import UserError
from drover.pipeline.files import read_record, sha256_json

UNITS = "units"
PARTS = Path(UNITS) / "parts"
T = TypeVar("T")


@dataclass(frozen=True)
class Part:
    """One share of several of a phase's units: `index` counts from 0."""

    index: int
    count: int
    phase: str

    @classmethod
    def parse(cls, text: str, phase: str) -> Part:
        """Read `I/N`; UserError if it is not one."""
        found = re.fullmatch(r"([0-9]{1,9})/([0-9]{1,9})", text)
        part = cls(int(found[1]), int(found[2]), phase) if found else cls(0, 0, phase)
        if not part.index < part.count:
            raise UserError(f"--part {text} is not a part of a whole. Give I/N: I counts from 0 and is less than N, as "
                            f"in --part 0/4.")
        return part

    def __str__(self) -> str:
        return f"{self.index}/{self.count}"

    @property
    def tag(self) -> str:
        """For file names: `0-of-4`."""
        return f"{self.index}-of-{self.count}"

    def of(self, units: Sequence[T]) -> Sequence[T]:
        """Every count-th unit: neighbours are alike in size, so the shares are too."""
        return units[self.index::self.count]

    @property
    def word(self) -> str:
        """Name of the file, beside the marker, with the last word of this share (`drover.pipeline.contract.state`)."""
        return last_word_file(self.phase, self.index, self.count)

    def marker(self, folder: Path) -> Path:
        """Where the stage in `folder` notes that this share is done."""
        return folder / PARTS / f"{self.phase}.{self.tag}.json"


def last_word_file(phase: str, index: int, count: int) -> str:
    """Name of the file in `PARTS` with the last word of a share that was stopped."""
    return f"{phase}.{index}-of-{count}.state.json"


class ShareDone(Exception):  # noqa: N818 - no error: it leaves the stage's body, which goes on to things for all units
    """A part of a stage has done its share of the units."""


def identity_key(fingerprint: dict[str, Any]) -> str:
    """What a marker holds of the settings and inputs that its units were made of."""
    return sha256_json(fingerprint)


def marked_parts(folder: Path, count: int, phase: str, key: str | None = None) -> set[int]:
    """Which of `count` parts of a phase the stage in `folder` has markers of; with `key`, only those made under that
    identity."""
    pattern = re.compile(rf"{re.escape(phase)}\.([0-9]+)-of-{count}\.json")
    markers = [(path, found) for path in (folder / PARTS).glob("*.json") if (found := pattern.fullmatch(path.name))]
    return {int(found[1]) for path, found in markers if key is None or _key(path) == key}


def _key(path: Path) -> Any:
    try:
        return (read_record(path, dict[str, Any]) or {}).get("key")
    except UserError:  # torn, as a full disk leaves it: then nothing is known to be done
        return None
