"""What a verification finds, and its report."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class Problem:
    """A file that is not what it should be: what is wrong with it, and what to do."""

    file: str
    what: str
    do: str

    def __str__(self) -> str:
        return f"{self.file}: {self.what}. {self.do}."


@dataclass(frozen=True)
class Found:
    """What the check of one thing came to.

    Attributes:
        problems: what is wrong.
        files, bytes: read and compared.
        notes: (what is to be known, of which file): said with their number, no problem.
    """

    problems: tuple[Problem, ...] = ()
    files: int = 0
    bytes: int = 0
    notes: tuple[tuple[str, str], ...] = ()


@dataclass
class Report:
    """Everything that was found in a run.

    Attributes:
        run: its folder.
        problems: in the order of the stages and files.
        files, bytes: that were read and compared with what is recorded of them.
        shards, shards_read: text and token shards there are, and those that were read; of the others only the size
            was looked at.
        notes: files by what is to be known of them, such as that nothing records their content.
    """

    run: str
    problems: list[Problem] = field(default_factory=list)
    files: int = 0
    bytes: int = 0
    shards: int = 0
    shards_read: int = 0
    notes: dict[str, list[str]] = field(default_factory=dict)

    def add(self, found: Iterable[Found]) -> None:
        """Take in what checks found, in their order."""
        for one in found:
            self.problems += one.problems
            self.files += one.files
            self.bytes += one.bytes
            for note, file in one.notes:
                self.note(note, file)

    def note(self, note: str, file: str) -> None:
        """Something to be known of a file that is no problem."""
        self.notes.setdefault(note, []).append(file)

    @property
    def status(self) -> int:
        """The exit status: 0 where nothing is wrong, else 1."""
        return int(bool(self.problems))

    def as_json(self) -> dict[str, Any]:
        """All of it."""
        return asdict(self)

    def lines(self, shown: int = 3) -> list[str]:
        """The report for a person; of each note so many files are named."""
        left = self.shards - self.shards_read
        sampled = f" ({self.shards_read:,} of {self.shards:,} shards; of the others the size)" if left else ""
        told = [f"{self.run}: {self.files:,} files, {self.bytes / 1e6:,.1f} MB read and compared with what is recorded "
                f"of them{sampled}"]
        for note, files in sorted(self.notes.items()):
            more = f" ... and {len(files) - shown:,} more" if len(files) > shown else ""
            told.append(f"{note}: {len(files):,} ({', '.join(files[:shown])}{more})")
        told += [f"WRONG  {problem}" for problem in self.problems]
        told.append(f"{len(self.problems):,} problems" if self.problems else "nothing is wrong")
        return told
