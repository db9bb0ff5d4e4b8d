"""Data sets of the Hub that `drover tasks fetch` has downloaded for tasks.

A folder holds `OWNER/NAME/COMMIT/`, a data set's files at one commit, and `OWNER/NAME/fetched.json`, which is written
last: what each configuration reads, the sha256 of every file, and facts of the tasks. Paths are relative, so the folder
can be copied.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict

from drover.pipeline.core.files import Inside, Outputs, problem_of, read_record

FORMAT = 1
RECORD = "fetched.json"


class TaskFacts(TypedDict):
    """items: of the split that is measured. chance: the expected accuracy of guessing; None without choices."""

    configuration: str
    metrics: list[str]
    items: int
    chance: float | None


@dataclass(frozen=True)
class FetchedData:
    """A data set on disk.

    Attributes:
        dataset: its name on the Hub.
        revision: the commit, 40 hexadecimal digits.
        configurations: the data files that each reads; "" is the only one of a data set.
        files: records of all files, the card included, with paths inside the commit's folder.
        tasks: by name, what the harness found when it loaded each.
    """

    format: int
    dataset: str
    revision: Inside
    configurations: dict[str, list[Inside]]
    files: Outputs
    tasks: dict[str, TaskFacts]

    def problems(self, folder: Path, configuration: str) -> Iterator[str]:
        """Which files of a configuration under the commit's folder are not what was recorded, a sentence each."""
        others = set[str]().union(*self.configurations.values()) - {*self.configurations[configuration]}
        yield from filter(None, (problem_of(folder / record["path"], record) for record in self.files
                                 if record["path"] not in others))


def read_fetched(folder: Path, dataset: str) -> FetchedData | None:
    """The record of a data set in the folder; None if it was not fetched, UserError if it is damaged."""
    return read_record(folder / dataset / RECORD, FetchedData, "Delete it, and fetch its tasks again.", FORMAT)
