"""Traffic between ranks: every collective that torch dispatches, with its group and bytes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group

NAMESPACES = ("c10d", "_c10d_functional")
KINDS = {"allgather": "all-gather", "reducescatter": "reduce-scatter", "allreduce": "all-reduce",
         "alltoall": "all-to-all", "broadcast": "broadcast", "send": "send", "recv": "receive"}
"""The usual names of collectives, by a part of the names of torch's operators without underscores. Other operators keep
their names."""


@dataclass(frozen=True, order=True)
class Collective:
    """A kind of collective in a group. group: an axis of the grid, `weights` (shard and context), `copy`, or `all
    ranks`. ranks: in the group."""

    group: str
    operation: str
    ranks: int


@dataclass
class Traffic:
    """Calls and bytes by channel.

    The bytes of a call are what this rank sends or receives, whichever is more: the result of an all-gather, the input
    of a reduce-scatter, the tensor of any other collective.
    """

    calls: Counter[Collective] = field(default_factory=Counter)
    bytes: Counter[Collective] = field(default_factory=Counter)

    def add(self, other: Traffic, times: int = 1) -> None:
        """Add the calls of `other`, so many times."""
        for channel in other.calls:
            self.calls[channel] += times * other.calls[channel]
            self.bytes[channel] += times * other.bytes[channel]

    def note(self, operator: Any, arguments: Iterable[Any], result: Any) -> None:
        """Count a call of one of torch's operators, if it is a collective."""
        name = operator._schema.name.partition("::")[2]
        kind = next((kind for part, kind in KINDS.items() if part in name.replace("_", "")), name)
        group = next(filter(None, map(_group, arguments)), None)
        if group is None or "barrier" in name:
            assert kind not in KINDS.values(), f"{operator} has a group that is not found"
            return  # a wait for a collective that was counted
        channel = Collective(_described(group), kind, group.size())
        self.calls[channel] += 1
        self.bytes[channel] += max(map(_bytes, (*arguments, result)))


def _group(argument: Any) -> dist.ProcessGroup | None:
    """The process group in an operator's argument: an object, boxed, or a name."""
    if isinstance(argument, dist.ProcessGroup):
        return argument
    if isinstance(argument, str) and argument not in ("sum", "avg", "max", "min", "product"):
        return _resolve_process_group(argument)  # type: ignore[arg-type]  # torch has a type of its own for names
    if type(argument).__name__ in ("ScriptObject", "FakeScriptObject") and "ProcessGroup" in str(argument):
        return dist.ProcessGroup.unbox(argument)
    return None


def _described(group: dist.ProcessGroup) -> str:
    """The grid's name of a group's axis."""
    text = group.group_desc
    return "all ranks" if text == "default_pg" else text.removeprefix("mesh_") or group.group_name


def _bytes(value: Any) -> int:
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    return sum(map(_bytes, value)) if isinstance(value, (list, tuple)) else 0
