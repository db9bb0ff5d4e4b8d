"""Nodes that failed a run: their records in `launch/nodes.jsonl`, and the states of nodes in Slurm.

A node with two failures within a day is excluded from the next submission. Failures expire after a day, or once a start
with the node has ended well with a new checkpoint. Only a few nodes are excluded, because a fault that many nodes share
is not the fault of the nodes.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from datetime import UTC, datetime, timedelta
from operator import itemgetter
from pathlib import Path
from typing import TypedDict

from drover.launch.slurm.scheduler import Scheduler
from drover.pipeline.contract.state import Time, now
from drover.pipeline.core.console import first
from drover.pipeline.core.files import append_line, read_lines

NODES = Path("launch") / "nodes.jsonl"
EXCLUDED_AFTER = 2
WITHIN = timedelta(hours=24)
ONE_IN = 20
"""At most one node in so many, but at least one, is blamed at once or excluded."""
LIFTED = ""
"""In place of a failure's start: the failures before no longer count."""
NAMED = 8
"""The most nodes that a sentence names."""
LOST = ("down", "fail", "error", "not_responding")
"""Prefixes of the states of failed nodes."""
INTENDED = ("maint", "power", "reboot")
"""Prefixes of states in which a node does not answer because an administrator wants that."""


class NodeFailure(TypedDict):
    """A line of `NODES`. job: the start, by the job's name, restart and number, or LIFTED."""

    node: str
    at: Time
    job: str


def record_failure(run_folder: Path, node: str, job: str, reason: str) -> int:
    """Record that a node failed the run; how many starts it failed within a day and since it last worked well
    (`clear_failures`), including this one.

    job: the start, by the job's name, restart and number. An accident that is noticed twice is one failure.
    """
    append_line(run_folder / NODES, {"node": node, "at": now(), "job": job, "reason": reason})
    return failures(run_folder).get(node, 0)


def clear_failures(run_folder: Path, nodes: Collection[str]) -> None:
    """Record that nodes worked well."""
    for node in {*failures(run_folder)}.intersection(nodes):
        append_line(run_folder / NODES, {"node": node, "at": now(), "job": LIFTED, "reason": "made a checkpoint"})


def failures(run_folder: Path) -> dict[str, int]:
    """Failures of each node within a day: starts that it failed, for whatever reason. The node with most comes first,
    of equal ones that which failed last."""
    since = (datetime.now(UTC) - WITHIN).isoformat()
    starts = dict[str, set[str]]()
    for failure in read_lines(run_folder / NODES, NodeFailure, appended=True):
        node = failure["node"]
        if failure["job"] == LIFTED:
            starts.pop(node, None)
        elif failure["at"] > since:
            starts[node] = {*starts.pop(node, ()), failure["job"]}  # at the end: it failed last
    counts = {node: len(jobs) for node, jobs in reversed(starts.items())}
    return dict(sorted(counts.items(), key=itemgetter(1), reverse=True))


def few(count: int) -> int:
    """How many of `count` nodes may be blamed at once or excluded: if more fail, the cause is common to them."""
    return max(1, count // ONE_IN)


def named(nodes: Collection[str]) -> str:
    """Nodes for a sentence: the first ones by name, the others as a number."""
    return first(sorted(nodes), NAMED)


def failing(run_folder: Path, wanted: int = 1) -> list[str]:
    """Nodes to exclude from the next submission. wanted: how many nodes it requests."""
    return [node for node, count in failures(run_folder).items() if count >= EXCLUDED_AFTER][:few(wanted)]


def lost(nodes: Sequence[str], scheduler: Scheduler) -> dict[str, str]:
    """Those of `nodes` that failed, with their state in Slurm (`down*`); {} if it does not answer. Nodes that an
    administrator drained, powers down or reboots do not count."""
    states = scheduler.node_states(nodes) if nodes else {}
    return {name: state for name, state in states.items() if is_lost(state)}


def is_lost(state: str) -> bool:
    """Whether a state of sinfo (`idle`, `down*`, `drained`) means that the node failed. `*`: it does not answer."""
    word = state.lower()
    return word.startswith(LOST) or (word.endswith("*") and not word.startswith(INTENDED))
