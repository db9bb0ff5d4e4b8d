"""Nodes that failed a run: strikes in `launch/nodes.jsonl`, and what Slurm says of nodes.

A node with two strikes within a day is left out of what is submitted next.
"""

from __future__ import annotations

import socket
import subprocess
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

from launch.slurm.scheduler import Scheduler
from pipeline.files import append_line, read_lines
from pipeline.state import now

NODES = Path("launch") / "nodes.jsonl"
STRIKES = 2
WITHIN = timedelta(hours=24)
PATIENCE_S = 20
LOST = ("down", "drain", "fail", "not_responding", "reboot", "error", "power", "maint")
"""Beginnings of states of nodes that no job runs on."""


def add_strike(run_folder: Path, node: str, job: str, reason: str) -> int:
    """Record that a node failed the run; its strikes within a day, this one included. One per node and job start."""
    append_line(run_folder / NODES, {"node": node, "at": now(), "job": job, "reason": reason})
    return strikes(run_folder).get(node, 0)


def strikes(run_folder: Path, at: datetime | None = None) -> dict[str, int]:
    """Strikes of each node in the day before `at` (now)."""
    since, found = (at or datetime.now(UTC)) - WITHIN, dict[str, int]()
    for line in read_lines(run_folder / NODES, appended=True):
        try:
            recent = datetime.fromisoformat(line["at"]) > since
        except (KeyError, TypeError, ValueError):
            continue
        if recent:
            found[line["node"]] = found.get(line["node"], 0) + 1
    return found


def excluded(run_folder: Path, at: datetime | None = None) -> list[str]:
    """Nodes to leave out of the next submission, sorted."""
    return sorted(node for node, count in strikes(run_folder, at).items() if count >= STRIKES)


def address(node: str, scheduler: Scheduler) -> str:
    """What a node is reached by: its name if that resolves here, else what Slurm knows of it."""
    try:
        socket.getaddrinfo(node, None)
        return node
    except OSError:
        return scheduler.node_address(node)


def lost(nodes: Sequence[str], scheduler: Scheduler) -> dict[str, str]:
    """Those of `nodes` that Slurm holds for down, drained or not responding, with its word for it; {} if it does not
    answer."""
    states = scheduler.node_states(nodes) if nodes else {}
    return {name: state for name, state in states.items() if is_lost(state)}


def is_lost(state: str) -> bool:
    """Whether a state as sinfo writes it (`idle`, `down*`, `drained`) means that nothing runs on the node. `*`: it does
    not answer."""
    return state.endswith("*") or state.lower().startswith(LOST)


def leave_out(job: str, nodes: Iterable[str], scheduler: Scheduler) -> str | None:
    """Tell Slurm not to start a waiting job on `nodes`, besides those that it leaves out already; None, or why that
    cannot be."""
    try:
        shown = subprocess.run(["scontrol", "--oneliner", "show", "job", job], capture_output=True, text=True,
                               timeout=PATIENCE_S, check=True).stdout
    except (OSError, subprocess.SubprocessError) as error:
        return str(error)
    before = next((word.partition("=")[2] for word in shown.split() if word.startswith("ExcNodeList=")), "(null)")
    names = {*nodes, *(scheduler.hostnames(before) if before != "(null)" else ())}
    return scheduler.update(job, "ExcNodeList", ",".join(sorted(names)))
