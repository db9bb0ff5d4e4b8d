"""What ranks that hang leave behind, and who of them is late. Read by the launcher, so without torch.

    train/hangs/<job>.<restart>.<attempt>/node<N>.jsonl    where the main thread of each of its ranks was (`HungRank`)
                                         /rank<R>.stacks   all threads of a rank
                                         /rank<R>.flight.* its last collectives, as torch's flight recorder has them

Of the last two only the first `IN_FULL` ranks write any.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from drover.pipeline.core.console import first, spelled
from drover.pipeline.core.errors import UserError
from drover.pipeline.core.files import append_line, read_lines, read_record, write_sealed

HUNG_STATUS = 14
"""How a process that found itself hanging ends."""
HANGS = "hangs"
PLACES = "places.json"
"""In the train folder: on which node each rank of the last start runs."""
IN_FULL = 64
"""So many ranks, the first ones, write more than their record."""
FEW = 0.1
"""The share of the ranks (but always one) that may be named for having left no record."""
WAITING = ("torch/distributed/", "deepspeed/comm/", "pipeline/parallel/ranks.py")
"""Parts of files in whose functions a rank waits for others."""
ENTRY = "pipeline/contract/entry.py"
"""Where a stage's work is begun: no place to hang in."""


@dataclass(frozen=True)
class HungRank:
    """What one rank wrote: the last step it finished, seconds without a sign of life, when it wrote (seconds since
    1970), and the main thread's functions as `file:line function`, innermost last."""

    rank: int
    node: str
    step: int
    silent_s: float
    at: float
    stack: tuple[str, ...]

    @property
    def calls(self) -> tuple[str, ...]:
        """The stack without line numbers: `file function`."""
        return tuple(f"{place.rpartition(':')[0]} {function}" for place, _, function in
                     (call.rpartition(" ") for call in self.stack))

    @property
    def waits(self) -> bool:
        """Whether it waits for other ranks, as far as Python's stack shows it."""
        return any(part in call for call in self.calls for part in WAITING)


@dataclass(frozen=True)
class Places:
    """The node of each rank of a start."""

    attempt: str
    nodes: tuple[str, ...]


@dataclass(frozen=True)
class Hang:
    """Who is late, as (rank, node; None where it is not known), and a sentence or two for people."""

    late: tuple[tuple[int, str | None], ...]
    text: str


def attempt_key(environment: Mapping[str, str] = os.environ) -> str:
    """What this start is called: Slurm's job, its restart, the start within it; `local.0.0` outside of Slurm."""
    return ".".join((environment.get("SLURM_JOB_ID") or "local", environment.get("SLURM_RESTART_COUNT") or "0",
                     environment.get("DROVER_ATTEMPT") or "0"))


def hang_folder(train_folder: Path, key: str | None = None) -> Path:
    """Where the ranks of a start (by default this one) write when they hang."""
    return train_folder / HANGS / (key or attempt_key())


def write_places(train_folder: Path, nodes: Sequence[str]) -> None:
    """Note on which node each rank of this start runs: a rank that hangs altogether cannot say so itself."""
    write_sealed(train_folder / PLACES, asdict(Places(attempt_key(), tuple(nodes))))


def write_record(folder: Path, record: HungRank) -> None:
    """Add a rank's record to its node's file."""
    append_line(folder / f"node{os.environ.get('GROUP_RANK', '0')}.jsonl", asdict(record))


def read_hang(folder: Path) -> list[HungRank]:
    """What the ranks of one start wrote, in their order; a torn record counts as none."""
    found: list[HungRank] = []
    for path in folder.glob("node*.jsonl"):
        with suppress(OSError):
            found += read_lines(path, HungRank, appended=True)
    return sorted(found, key=lambda record: record.rank)


def judge_hang(folder: Path, ranks: int) -> Hang:
    """Who of `ranks` ranks kept the others waiting.

    Late are those that are elsewhere than the largest group that stopped in one place (of groups of equal size, one
    that waits for others counts as the larger; where that leaves two, it cannot be told), and ranks that wrote nothing
    if they are few: many are rather ended before they could write than late. Ranks that wait for others themselves are
    not named if there are late ones that do not, or ranks whose place is unknown.
    """
    records = read_hang(folder)
    nodes = {**_places(folder), **{record.rank: record.node for record in records}}
    missing = sorted(set(range(ranks)) - {record.rank for record in records})
    if not records:
        return Hang((), "no rank left a record of where it was")
    groups, named = _groups(records), missing if _are_few(missing, records, ranks) else []
    undecided = len({_weight(group) for group in groups[:2]}) < len(groups[:2])
    apart = [] if undecided else [record for group in groups[1:] for record in group]
    idle = [record.rank for record in apart if not record.waits]
    late = sorted([*named, *idle]) or ([] if missing else sorted(record.rank for record in apart))
    told = [_told(group, ranks, nodes) for group in groups]
    if named:
        told.append(f"{_named(named, nodes)} left no record: the process or its node does not run any more")
    elif missing:
        told.append(f"{len(missing)} of {ranks} ranks left no record: where they were is not known")
    if undecided or (missing and not late):
        told.append("who of them keeps the others waiting cannot be told")
    elif not late:
        told.append("no rank is behind the others; the network or a device may be at fault")
    return Hang(tuple((rank, nodes.get(rank)) for rank in late), "; ".join(told))


def _are_few(missing: Sequence[int], records: Sequence[HungRank], ranks: int) -> bool:
    """Whether ranks without a record may be what the others wait for."""
    waiting = sum(record.waits for record in records)
    return len(missing) <= max(1, FEW * ranks) and (len(missing) < waiting or 0 < waiting == len(records))


def _groups(records: Sequence[HungRank]) -> list[list[HungRank]]:
    """Ranks that stopped at one step in one place, the largest group first."""
    found: dict[Any, list[HungRank]] = {}
    for record in records:
        # Rank 0 comes to the stage's work by another way through the entry than those that it told of it.
        place = tuple(call for call in record.calls if ENTRY not in call)
        found.setdefault((record.step, place), []).append(record)
    return sorted(found.values(), key=lambda group: (*_weight(group), group[0].rank))


def _weight(group: Sequence[HungRank]) -> tuple[int, bool]:
    """What makes a group the one that the others are measured by: the smaller, the more."""
    return -len(group), not group[0].waits


def _told(group: Sequence[HungRank], ranks: int, nodes: Mapping[int, str]) -> str:
    first = group[0]
    who = "every rank" if len(group) == ranks else _named([record.rank for record in group], nodes)
    functions = " > ".join(call.rpartition(" ")[2] for call in first.calls[-4:])
    file = "/".join(Path(first.calls[-1].rpartition(" ")[0]).parts[-3:]) if first.calls else "?"
    one = len(group) in (1, ranks)
    does = ("waits" if one else "wait") if first.waits else ("is" if one else "are")
    return f"{who} {does} in {functions} ({file}) after step {first.step}"


def _named(ranks: Sequence[int], nodes: Mapping[int, str]) -> str:
    there = list(dict.fromkeys(nodes[rank] for rank in ranks if rank in nodes))
    where = f" ({first(there, what='more nodes')})" if there else ""
    return f"rank{'' if len(ranks) == 1 else 's'} {spelled(ranks)}{where}"


def _places(folder: Path) -> dict[int, str]:
    """Nodes of the ranks as that start noted them."""
    with suppress(UserError):
        record = read_record(folder.parent.parent / PLACES, Places)
        return dict(enumerate(record.nodes)) if record and record.attempt == folder.name else {}
    return {}
