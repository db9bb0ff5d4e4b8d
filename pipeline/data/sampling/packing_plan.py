"""A packing's plan, made once: each rank plans some shards, and the index of all is written last.

There is a plan of all documents for each length of sequences, and of what an epoch has left where the length changes
(packed_phases.py).

At every start the files are compared with the index. One that is missing, torn or changed is made anew; if that does
not give what the index says, the shard is not the one that was planned, and training stops.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from pipeline.data.sampling.packing import PLANNED, Packing, write_plan
from pipeline.data.shard_table import OpenShards, ShardTable
from pipeline.errors import UserError, listed
from pipeline.files import read_json, sha256_file, sha256_json, write_sealed

FORMAT = 1
INDEX = "index.json"
Columns = tuple[np.ndarray, np.ndarray]
"""`numbers` and `sha256` of a packing."""
SHOWN = 10
"""Shards that cannot be planned and are named; of the others the number is."""


class Group(Protocol):
    """The ranks that plan together (`pipeline.parallel.ranks.Ranks`)."""

    @property
    def rank(self) -> int:
        """This one's number."""

    @property
    def world(self) -> int:
        """How many there are."""

    def gather(self, value: Any) -> list[Any]:
        """A value of each, on each."""


class Alone:
    """A group of one process: a tool's."""

    rank, world = 0, 1

    def gather(self, value: Any) -> list[Any]:
        """See Group."""
        return [value]


@dataclass(frozen=True)
class Planning:
    """A plan that is to be there.

    Attributes:
        folder: of the plan. shards: those of a table. length: tokens of a sequence.
        rows: the shards, of these, that it is of.
        write: plans the shard of a row into a file, and gives its counts and digest (`write_plan`).
        left: what identifies the sequences that it leaves out; None where it is of all documents.
    """

    folder: Path
    shards: OpenShards
    length: int
    rows: NDArray[np.int64]
    write: Callable[[Path, int], tuple[list[int], bytes]]
    left: Any = None

    @classmethod
    def whole(cls, folder: Path, shards: OpenShards, length: int) -> Planning:
        """Of all documents in a table's training shards."""
        return cls(folder, shards, length, shards.table.rows("train"),
                   lambda path, row: write_plan(path, shards.shard(row), length))

    @property
    def table(self) -> ShardTable:
        """Of the shards."""
        return self.shards.table

    def __str__(self) -> str:
        of = "" if self.left is None else f" in sequences of {self.length:,}, of what an epoch has left where the " \
                                          f"length changes,"
        return f"the best-fit packing{of}"

    def identity(self) -> dict[str, Any]:
        """What the index says that it is of."""
        return {"format": FORMAT, "packing": "best_fit", "length": self.length,
                "shards_sha256": sha256_json({"shards": self.table.content("train")}, streamed="shards"),
                **({} if self.left is None else {"left_by": self.left})}


def make(planning: Planning, group: Group, say: Callable[[str], None]) -> Packing:
    """A plan, with what is missing or damaged of it made. Called on all ranks alike.

    Args:
        say: is told, on rank 0, what was made and why.

    Raises:
        UserError: a shard cannot be read, or is not the one that was planned; the same on every rank.
    """
    table = planning.table
    known, why = group.gather(_read_index(planning) if group.rank == 0 else None)[0]
    mine, problems = planning.rows[group.rank::group.world], list[str]()
    own = Packing(planning.folder, table, planning.length, *(_columns(table) if known is None else known))
    made = 0
    for row in mine.tolist():
        try:
            made += _planned(own, planning, row, known is not None)
        except UserError as error:
            problems.append(str(error))
    parts = group.gather((mine, own.numbers[mine], own.sha256[mine], made, problems))
    if found := [problem for part in parts for problem in part[-1]]:
        more = f"\n... and {len(found) - SHOWN:,} more" if len(found) > SHOWN else ""
        raise UserError(found[0] if len(found) == 1 else
                        f"{len(found):,} token shards cannot be packed:\n{listed(found[:SHOWN])}{more}")
    for rows, numbers, digests, _, _ in parts:
        own.numbers[rows], own.sha256[rows] = numbers, digests
    made = sum(part[3] for part in parts)
    if group.rank == 0 and made:
        say(f"planned {planning} of {made:,} of {len(planning.rows):,} token shards: "
            f"{why or 'their files were missing or damaged'}")
    if group.rank == 0 and known is None:
        _write_index(own, planning)
    group.gather(None)  # nobody goes on before the index is there
    return own


def read(planning: Planning, say: Callable[[str], None]) -> Packing:
    """The plan as its index has it, files not looked at. For tools, which write nothing into a run: where there is no
    index, the same plan is made in a temporary folder that goes with it, which is said.

    Raises:
        UserError: a shard cannot be read.
    """
    known, why = _read_index(planning)
    if known is not None:
        return Packing(planning.folder, planning.table, planning.length, *known)
    say(f"the plan of {planning} is not in {planning.folder}: {why}. It is made for this time alone, in a temporary "
        f"folder, for which its shards are read; training makes it when it starts, and keeps it.")
    aside = TemporaryDirectory(prefix="packing-")
    made = make(replace(planning, folder=Path(aside.name) / planning.folder.name), Alone(), lambda text: None)
    weakref.finalize(made, aside.cleanup)
    return made


def forget(packing: Packing) -> None:
    """Have the next start plan all anew: a shard turned out to be damaged, and what was planned of it may be wrong."""
    (packing.folder / INDEX).unlink(missing_ok=True)


def _columns(table: ShardTable) -> Columns:
    return np.zeros((len(table), len(PLANNED)), np.int64), np.zeros((len(table), 32), np.uint8)


def _planned(packing: Packing, planning: Planning, row: int, known: bool) -> bool:
    """See that a shard's plan is there, and note what it is; whether it had to be made.

    known: the packing has what the index says of it.
    """
    path = packing.path(row)
    if known and path.is_file() and sha256_file(path) == packing.sha256[row].tobytes().hex():
        return False
    numbers, digest = planning.write(path, row)
    if known and digest != packing.sha256[row].tobytes():
        raise UserError(f"{planning.shards.shard(row).name} gives another plan of its packing than "
                        f"{packing.folder / INDEX} has: its content was changed. Delete the file and run --stage "
                        f"encode again, which makes it anew; then the same command goes on.")
    packing.numbers[row], packing.sha256[row] = numbers, np.frombuffer(digest, np.uint8)
    return True


def _write_index(packing: Packing, planning: Planning) -> None:
    table = packing.table
    plans = {table.path(row): [*packing.numbers[row].tolist(), packing.sha256[row].tobytes().hex()]
             for row in planning.rows.tolist()}
    write_sealed(packing.folder / INDEX, {**planning.identity(), "columns": [*PLANNED, "sha256"],
                                        "plans_sha256": sha256_json(plans), "plans": plans})


def _read_index(planning: Planning) -> tuple[Columns | None, str]:
    """What the index says of these shards' plans; None and why, where it says nothing of them."""
    path, (numbers, digests) = planning.folder / INDEX, _columns(planning.table)
    try:
        index, identity = read_json(path), planning.identity()
        if {key: index.get(key) for key in identity} != identity:
            return None, f"{path} is of other shards"
        if sha256_json(index["plans"]) != index["plans_sha256"]:
            return None, f"{path} was changed"
        for row in planning.rows.tolist():
            *counts, digest = index["plans"][planning.table.path(row)]
            numbers[row], digests[row] = counts, np.frombuffer(bytes.fromhex(digest), np.uint8)
    except FileNotFoundError:
        return None, "they were not planned before"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return None, f"{path} is torn ({type(error).__name__})"
    return (numbers, digests), ""
