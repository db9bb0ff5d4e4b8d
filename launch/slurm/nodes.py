"""Nodes that failed a run: strikes in `launch/nodes.jsonl`, and what Slurm says of nodes.

A node with two strikes within a day is left out of what is submitted next, but never more than a few: strikes lapse,
and what many nodes have is not the nodes' fault.
"""

from __future__ import annotations

import socket
from collections.abc import Collection, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TypedDict

from drover.launch.slurm.scheduler import Scheduler
from drover.pipeline.contract.state import Time, now
from drover.pipeline.core.console import first
from drover.pipeline.core.files import append_line, read_lines

NODES = Path("launch") / "nodes.jsonl"
STRIKES = 2
WITHIN = timedelta(hours=24)
ONE_IN = 20
"""At most one node in so many is blamed at once, or left out; one in any case."""
NAMED = 8
"""Nodes that a sentence names."""
LOST = ("down", "fail", "error", "not_responding")
"""Beginnings of states of nodes that failed."""
INTENDED = ("maint", "power", "reboot")
"""Beginnings of states in which a node does not answer for somebody wants it so."""


class Strike(TypedDict):
    """A line of `NODES`. job: the start, by the job's name, restart and number."""

    node: str
    at: Time
    job: str


def add_strike(run_folder: Path, node: str, job: str, reason: str) -> int:
    """Record that a node failed the run; its strikes within a day, this one included.

    job: the start, by the job's name, restart and number: one accident that is noticed twice is one strike.
    """
    append_line(run_folder / NODES, {"node": node, "at": now(), "job": job, "reason": reason})
    return strikes(run_folder).get(node, 0)


def strikes(run_folder: Path) -> dict[str, int]:
    """Strikes of each node within a day: starts of jobs that it failed, for whatever reasons. The node that has most
    comes first, of equals the one that failed last."""
    since = (datetime.now(UTC) - WITHIN).isoformat()
    starts, newest = dict[str, set[str]](), dict[str, int]()
    for number, strike in enumerate(read_lines(run_folder / NODES, Strike, appended=True)):
        if strike["at"] > since:
            starts.setdefault(strike["node"], set()).add(strike["job"])
            newest[strike["node"]] = number
    order = sorted(starts, key=lambda node: (len(starts[node]), newest[node]), reverse=True)
    return {node: len(starts[node]) for node in order}


def few(count: int) -> int:
    """How many of `count` nodes may be blamed at once, or left out: more at once have a cause in common."""
    return max(1, count // ONE_IN)


def named(nodes: Collection[str]) -> str:
    """Nodes in a sentence: the first ones by name, the others as a number."""
    return first(sorted(nodes), NAMED)


def failing(run_folder: Path, wanted: int = 1) -> tuple[list[str], list[str]]:
    """Nodes to leave out of the next submission, and those that failed as often, but are not left out, since that would
    be too many. wanted: how many nodes it asks for."""
    nodes = [node for node, count in strikes(run_folder).items() if count >= STRIKES]
    return nodes[:few(wanted)], nodes[few(wanted):]


def address(node: str, scheduler: Scheduler) -> str:
    """What a node is reached by: its name if that resolves here, else what Slurm knows of it."""
    try:
        socket.getaddrinfo(node, None)
        return node
    except OSError:
        return scheduler.node_address(node)


def lost(nodes: Sequence[str], scheduler: Scheduler) -> dict[str, str]:
    """Those of `nodes` that failed, with Slurm's word for it (`down*`); {} if it does not answer. Not those that an
    administrator drained, powers down or boots again."""
    states = scheduler.node_states(nodes) if nodes else {}
    return {name: state for name, state in states.items() if is_lost(state)}


def is_lost(state: str) -> bool:
    """Whether a state as sinfo writes it (`idle`, `down*`, `drained`) means that the node failed. `*`: it does not
    answer."""
    word = state.lower()
    return word.startswith(LOST) or (word.endswith("*") and not word.startswith(INTENDED))
