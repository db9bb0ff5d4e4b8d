"""The records of hung ranks, and which of them are late. Read by the launcher, so without torch.

    train/hangs/<job>.<restart>.<attempt>/node<N>.jsonl    where the main thread of each of its ranks was (`HungRank`)
                                         /rank<R>.stacks   all threads of a rank
                                         /rank<R>.flight.* its last collectives, from torch's flight recorder

Only the first `IN_FULL` ranks write the last two.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from drover.pipeline.contract.state import this_job
from drover.pipeline.core.console import first, number_ranges
from drover.pipeline.core.errors import UserError
from drover.pipeline.core.files import append_line, read_lines, read_record, write_sealed

HUNG_STATUS = 14
"""Exit status of a process that found itself hanging."""
HANGS = "hangs"
PLACES = "places.json"
"""In the train folder: the node of each rank of the last start."""
IN_FULL = 64
"""Number of ranks, the first ones, that write more than their record."""
FEW = 0.1
"""Share of the ranks (at least one) that may be named late because they left no record."""
WAITING = ("torch/distributed/", "deepspeed/comm/", "pipeline/parallel/ranks.py")
"""Parts of files whose functions wait for other ranks."""
ENTRY = "pipeline/contract/entry.py"
"""Where a stage's work starts; no rank hangs there."""


@dataclass(frozen=True)
class HungRank:
    """The record of one rank: its last finished step, seconds without a sign of life, the time of writing (seconds
    since 1970), and the main thread's functions as `file:line function`, innermost last."""

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
        """Whether it waits for other ranks, as far as Python's stack shows."""
        return any(part in call for call in self.calls for part in WAITING)


@dataclass(frozen=True)
class Places:
    """The node of each rank of a start."""

    attempt: str
    nodes: tuple[str, ...]


@dataclass(frozen=True)
class Hang:
    """The late ranks, as (rank, node; None if unknown), and an explanation in a sentence or two."""

    late: tuple[tuple[int, str | None], ...]
    text: str


def attempt_key() -> str:
    """The name of this start: Slurm's job, its restart, the start within it; `local.0.0` outside of Slurm."""
    return ".".join((os.environ.get("SLURM_JOB_ID") or "local", os.environ.get("SLURM_RESTART_COUNT") or "0",
                     str(this_job().start)))


def hang_folder(train_folder: Path, key: str | None = None) -> Path:
    """The folder in which the ranks of a start (by default this one) record a hang."""
    return train_folder / HANGS / (key or attempt_key())


def write_places(train_folder: Path, nodes: Sequence[str]) -> None:
    """Write the node of each rank of this start: a completely hung rank cannot do so itself."""
    write_sealed(train_folder / PLACES, asdict(Places(attempt_key(), tuple(nodes))))


def write_record(folder: Path, record: HungRank) -> None:
    """Add a rank's record to its node's file."""
    append_line(folder / f"node{os.environ.get('GROUP_RANK', '0')}.jsonl", asdict(record))


def read_hang(folder: Path) -> list[HungRank]:
    """The records of the ranks of one start, in their order; truncated ones are skipped."""
    result: list[HungRank] = []
    for path in folder.glob("node*.jsonl"):
        with suppress(OSError):
            result += read_lines(path, HungRank, appended=True)
    return sorted(result, key=lambda record: record.rank)


def judge_hang(folder: Path, ranks: int) -> Hang:
    """Find the ranks that kept the others waiting.

    The largest group of ranks that stopped in one place is the reference. Of groups of equal size, one that waits for
    others counts as the larger; if two remain equal, no decision is made. Ranks in other places are late. Ranks without
    a record are late if they are few: many were rather ended before they could write. Ranks that wait for others
    themselves are not named if there are late ones that do not wait, or ranks whose place is unknown.
    """
    records = read_hang(folder)
    nodes = {**_places(folder), **{record.rank: record.node for record in records}}
    missing = sorted(set(range(ranks)) - {record.rank for record in records})
    if not records:
        return Hang((), "no rank left a record")
    groups, named = _groups(records), missing if _are_few(missing, records, ranks) else []
    undecided = len({_weight(group) for group in groups[:2]}) < len(groups[:2])
    apart = [] if undecided else [record for group in groups[1:] for record in group]
    idle = [record.rank for record in apart if not record.waits]
    late = sorted([*named, *idle]) or ([] if missing else sorted(record.rank for record in apart))
    sentences = [_described(group, nodes) for group in groups]
    if named:
        sentences.append(f"{_named(named, nodes)} left no record: the process or its node no longer runs")
    elif missing:
        sentences.append(f"{len(missing)} of {ranks} ranks left no record: their place is unknown")
    if undecided or (missing and not late):
        sentences.append("the records do not show which of them keeps the others waiting")
    elif not late:
        sentences.append("no rank is behind the others; the network or a device may be at fault")
    return Hang(tuple((rank, nodes.get(rank)) for rank in late), "; ".join(sentences))


def _are_few(missing: Sequence[int], records: Sequence[HungRank], ranks: int) -> bool:
    """Whether the others may be waiting for the ranks without a record."""
    waiting = sum(record.waits for record in records)
    return len(missing) <= max(1, FEW * ranks) and (len(missing) < waiting or 0 < waiting == len(records))


def _groups(records: Sequence[HungRank]) -> list[list[HungRank]]:
    """Ranks that stopped at one step in one place, the largest group first."""
    result: dict[Any, list[HungRank]] = {}
    for record in records:
        # Rank 0 starts the stage's work by another path through the entry than the ranks to which it broadcasts.
        place = tuple(call for call in record.calls if ENTRY not in call)
        result.setdefault((record.step, place), []).append(record)
    return sorted(result.values(), key=lambda group: (*_weight(group), group[0].rank))


def _weight(group: Sequence[HungRank]) -> tuple[int, bool]:
    """The order of groups by which the reference is chosen: the smallest first."""
    return -len(group), not group[0].waits


def _described(group: Sequence[HungRank], nodes: Mapping[int, str]) -> str:
    first = group[0]
    functions = " > ".join(call.rpartition(" ")[2] for call in first.calls[-4:])
    file = "/".join(Path(first.calls[-1].rpartition(" ")[0]).parts[-3:]) if first.calls else "?"
    who = _named([record.rank for record in group], nodes)
    waiting = ", waiting for others" * first.waits
    return f"{who} in {functions} ({file}) after step {first.step}{waiting}"


def _named(ranks: Sequence[int], nodes: Mapping[int, str]) -> str:
    there = list(dict.fromkeys(nodes.get(rank, "unknown node") for rank in ranks))
    return f"rank {number_ranges(ranks)} ({first(there, what='more nodes')})"


def _places(folder: Path) -> dict[int, str]:
    """Nodes of the ranks as that start recorded them."""
    with suppress(UserError):
        record = read_record(folder.parent.parent / PLACES, Places)
        return dict(enumerate(record.nodes)) if record and record.attempt == folder.name else {}
    return {}
