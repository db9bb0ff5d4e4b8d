"""The ranks' nodes, devices and versions: exchanged once, first of all, to check that all ranks run the same thing."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from typing import TypedDict

import torch

from drover.pipeline.config.loading import config_hash
from drover.pipeline.contract.run import code_hashes
from drover.pipeline.contract.stage_work import Work
from drover.pipeline.contract.stages import STAGES
from drover.pipeline.contract.state import this_job
from drover.pipeline.core.console import counted, first, number_ranges
from drover.pipeline.core.errors import UserError
from drover.pipeline.core.files import sha256_json
from drover.pipeline.parallel.ranks import Ranks

SHOWN_NODES = 4
"""Nodes that a line names; it counts the others."""
MUST_AGREE = {"torch": "torch", "python": "Python", "nccl": "NCCL", "code": "code", "config": "configuration",
              "chain": "submission"}
"""What must be the same on all ranks, with its name in messages."""
HASHES, SHOWN_HASH = ("code", "config", "chain"), 12
"""Values of which messages show this many characters."""


class RankFacts(TypedDict):
    """A rank, as it describes itself. code: a hash of the code that it runs. world: the number of ranks that the
    launcher wanted to start, if known."""

    node: str
    device: str
    torch: str
    python: str
    nccl: str
    code: str
    config: str
    chain: str
    world: int | None


class RankAgreement:
    """All ranks of a run, in order.

    Attributes:
        nodes: the node of each rank.
    """

    def __init__(self, members: Sequence[RankFacts]) -> None:
        self.members = members
        self.nodes = [member["node"] for member in members]

    @classmethod
    def gather(cls, ranks: Ranks, work: Work) -> RankAgreement:
        """Gather the members from all ranks. Called on every rank alike.

        Raises:
            UserError: the ranks do not run the same thing, or their number is not the one that the launcher wanted.
        """
        result = cls(ranks.gather(describe_this(ranks, work)))
        if problem := result.problem():
            raise UserError(problem)
        return result

    def problem(self) -> str:
        """Why these ranks must not train together, in a sentence or two; empty if they may."""
        for key, name in MUST_AGREE.items():
            if differing := self._differing(key):
                return (f"The ranks do not run the same thing: {name} {differing}. Start all of them from one folder, "
                        f"with one environment and one command.")
        meant = {member["world"] for member in self.members} - {None, len(self.members)}
        return (f"{counted(len(self.members), 'rank')} found each other, but {meant.pop()} were to be started. Look in "
                f"the nodes' logs for ranks that ended at their start.") if meant else ""

    def warning(self) -> str:
        """A warning if the ranks' devices differ, which is slow but not wrong; otherwise empty."""
        differing = self._differing("device")
        return f"warning: the devices differ ({differing}); the slowest of them sets the pace" if differing else ""

    def __str__(self) -> str:
        """`4 ranks on 2 nodes: n1 0-1, n2 2-3; CPU; torch 2.13.0`."""
        nodes = [f"{node} {number_ranges(ranks)}" for node, ranks in _places(self.nodes).items()]
        one = self.members[0]
        devices = dict.fromkeys(member["device"] for member in self.members)
        nccl = f", NCCL {one['nccl']}" if one["nccl"] else ""
        return (f"{counted(len(self.members), 'rank')} on {counted(len(nodes), 'node')}: "
                f"{first(nodes, SHOWN_NODES, 'more nodes')}; {' and '.join(devices)}; torch {one['torch']}{nccl}")

    def _differing(self, key: str) -> str:
        """The values of a key with the ranks that have them, the most frequent first; "" if all are equal."""
        values = [str(member.get(key, "")) for member in self.members]  # ranks that run other code may not know it
        places = sorted(_places(values).items(), key=lambda item: -len(item[1]))
        return "" if len(places) == 1 else ", ".join(
            f"{value[:SHOWN_HASH if key in HASHES else None] or 'none'} on {number_ranges(ranks)} "
            f"({first(list(dict.fromkeys(self.nodes[rank] for rank in ranks)), SHOWN_NODES)})"
            for value, ranks in places)


def _places(values: Sequence[str]) -> dict[str, list[int]]:
    """The places of each value."""
    result: dict[str, list[int]] = {}
    for place, value in enumerate(values):
        result.setdefault(value, []).append(place)
    return result


def node_name() -> str:
    """This machine's name; on Slurm the name that Slurm uses, which may differ from the host name."""
    return os.environ.get("SLURMD_NODENAME") or platform.node()


def describe_this(ranks: Ranks, work: Work) -> RankFacts:
    """This rank."""
    return {"node": node_name(), "device": ranks.device_name or "CPU", "torch": str(torch.__version__),
            "python": platform.python_version(),
            "nccl": ".".join(map(str, torch.cuda.nccl.version())) if ranks.device.type == "cuda" else "",
            "code": sha256_json(code_hashes(STAGES[work.name], work.config)),
            "config": sha256_json([config_hash(work.config), work.command]),
            "chain": this_job().chain, "world": this_job().ranks or None}
