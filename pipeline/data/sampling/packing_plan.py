"""A packing's plan, made once: each rank plans some shards, and the index of all is written last.

At every start the files are compared with the index. One that is missing, torn or changed is made anew; if that does
not give what the index says, the shard is not the one that was planned, and training stops.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Protocol

import numpy as np

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


def make_packing(folder: Path, shards: OpenShards, length: int, group: Group,
                 say: Callable[[str], None]) -> Packing:
    """The plan of a table's training shards, with what is missing or damaged of it made. Called on all ranks alike.

    Args:
        folder: of the plan. shards: those of the table.
        say: is told, on rank 0, what was made and why.

    Raises:
        UserError: a shard cannot be read, or is not the one that was planned; the same on every rank.
    """
    table = shards.table
    known, why = group.gather(_read_index(folder, table, length) if group.rank == 0 else None)[0]
    mine, problems = table.rows("train")[group.rank::group.world], list[str]()
    own, made = Packing(folder, table, length, *(_columns(table) if known is None else known)), 0
    for row in mine.tolist():
        try:
            made += _planned(own, shards, row, known is not None)
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
        say(f"planned the best-fit packing of {made:,} of {len(table.rows('train')):,} token shards: "
            f"{why or 'their files were missing or damaged'}")
    if group.rank == 0 and known is None:
        _write_index(own)
    group.gather(None)  # nobody goes on before the index is there
    return own


def read_packing(folder: Path, shards: OpenShards, length: int, say: Callable[[str], None]) -> Packing:
    """The plan as its index has it, files not looked at. For tools, which write nothing into a run: where there is no
    index, the same plan is made in a temporary folder that goes with it, which is said.

    Raises:
        UserError: a shard cannot be read.
    """
    known, why = _read_index(folder, shards.table, length)
    if known is not None:
        return Packing(folder, shards.table, length, *known)
    say(f"the plan of the best-fit packing is not in {folder}: {why}. It is made for this time alone, in a temporary "
        f"folder, for which all shards are read; training makes it when it starts, and keeps it.")
    aside = TemporaryDirectory(prefix="packing-")
    made = make_packing(Path(aside.name), shards, length, Alone(), lambda text: None)
    weakref.finalize(made, aside.cleanup)
    return made


def forget(packing: Packing) -> None:
    """Have the next start plan all anew: a shard turned out to be damaged, and what was planned of it may be wrong."""
    (packing.folder / INDEX).unlink(missing_ok=True)


def _columns(table: ShardTable) -> Columns:
    return np.zeros((len(table), len(PLANNED)), np.int64), np.zeros((len(table), 32), np.uint8)


def _planned(packing: Packing, shards: OpenShards, row: int, known: bool) -> bool:
    """See that a shard's plan is there, and note what it is; whether it had to be made.

    known: the packing has what the index says of it.
    """
    path = packing.path(row)
    if known and path.is_file() and sha256_file(path) == packing.sha256[row].tobytes().hex():
        return False
    numbers, digest = write_plan(path, shards.shard(row), packing.length)
    if known and digest != packing.sha256[row].tobytes():
        raise UserError(f"{shards.shard(row).name} gives another plan of its packing than {packing.folder / INDEX} "
                        f"has: its content was changed. Delete the file and run --stage encode again, which makes it "
                        f"anew; then the same command goes on.")
    packing.numbers[row], packing.sha256[row] = numbers, np.frombuffer(digest, np.uint8)
    return True


def _identity(table: ShardTable, length: int) -> dict[str, Any]:
    return {"format": FORMAT, "packing": "best_fit", "length": length,
            "shards_sha256": sha256_json({"shards": table.content("train")}, streamed="shards")}


def _write_index(packing: Packing) -> None:
    table = packing.table
    plans = {table.path(row): [*packing.numbers[row].tolist(), packing.sha256[row].tobytes().hex()]
             for row in table.rows("train").tolist()}
    write_sealed(packing.folder / INDEX, {**_identity(table, packing.length), "columns": [*PLANNED, "sha256"],
                                        "plans_sha256": sha256_json(plans), "plans": plans})


def _read_index(folder: Path, table: ShardTable, length: int) -> tuple[Columns | None, str]:
    """What the index says of these shards' plans; None and why, where it says nothing of them."""
    path, (numbers, digests) = folder / INDEX, _columns(table)
    try:
        index, identity = read_json(path), _identity(table, length)
        if {key: index.get(key) for key in identity} != identity:
            return None, f"{path} is of other shards"
        if sha256_json(index["plans"]) != index["plans_sha256"]:
            return None, f"{path} was changed"
        for row in table.rows("train").tolist():
            *counts, digest = index["plans"][table.path(row)]
            numbers[row], digests[row] = counts, np.frombuffer(bytes.fromhex(digest), np.uint8)
    except FileNotFoundError:
        return None, "they were not planned before"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return None, f"{path} is torn ({type(error).__name__})"
    return (numbers, digests), ""
