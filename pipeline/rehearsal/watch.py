"""Observes every operator of a step as torch dispatches it, on real and on fake tensors: memory, traffic between ranks,
waits."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensor
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.utils._python_dispatch import TorchDispatchMode

from drover.pipeline.core.errors import NotRehearsedError
from drover.pipeline.rehearsal.memory import Memory

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


FOLDER = Path(__file__).resolve().parent
HOUSE = FOLDER.parents[1]
PLAIN = (Tensor, nn.Parameter, FakeTensor)
"""Tensors that own memory. Other types (DTensor, tensors in flight) wrap these."""
WAITING = {"_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero", "_unique2", "unique_dim"}
"""Operators whose result the host has to wait for."""
REDUCED = {"chunk_cat"}
GATHERED = {"all_gather_copy_in", "split_with_sizes_copy"}
"""FSDP2's own operators: inputs of a reduction; inputs and outputs of an all-gather."""
BY_FSDP2 = {"unshard": "all-gathered", "wait_for_unshard": "all-gathered", "post_backward": "gradients"}
"""Kinds of the tensors that FSDP2's functions create. A group of one rank calls none of the operators above."""
ONCE = {"_warmup_p2p"}
"""Functions of torch's pipelines that run only before the first step."""
ROOM = {"_create_act_recv_info", "_prepare_forward_infra", "_prepare_backward_infra"}
"""Functions in which torch's pipelines allocate buffers for what they will receive."""


class Watch(TorchDispatchMode):
    """Enter it after the model is built, around the steps.

    Args:
        head: (words, width) of the output matrix on this rank.

    Attributes:
        memory, traffic: the records. waits: places where the host waited for the device, and how often.
    """

    def __init__(self, head: tuple[int, int]) -> None:
        super().__init__()
        self.head = head
        self.memory, self.traffic = Memory(), Traffic()
        self.waits: Counter[str] = Counter()
        self._following = ExitStack()

    def __enter__(self) -> Watch:
        self._following.enter_context(self.memory.following())
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._following.close()

    def __torch_dispatch__(self, operator: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        if any(kind not in PLAIN for kind in types):
            return NotImplemented  # the wrapped tensors are dispatched next
        name = operator._schema.name.partition("::")[2]
        if name in WAITING:
            if not any(frame.f_code.co_name in ONCE for frame in frames()):
                self.waits[place()] += 1
            if name == "_local_scalar_dense" and isinstance(arguments[0], FakeTensor):
                return {torch.bool: False}.get(arguments[0].dtype, 1)  # no error flags, and pipelines' votes agree
        for tensor in tensors(arguments):
            self._look_at(tensor)
        try:
            result = operator(*arguments, **options or {})
        except (DataDependentOutputException, DynamicOutputShapeException):
            raise NotRehearsedError(f"The rehearsal ends at {place()}: the size of the result of {operator} depends on "
                                    f"computed values, so the host would wait for the device there in every step. Use "
                                    f"other settings (such as train.attention), or start without a rehearsal."
                                    ) from None
        if operator.namespace in NAMESPACES:
            self._collective(name, operator, [*arguments, *(options or {}).values()], result)
        for tensor in tensors(result):
            self._look_at(tensor)
        if operator.namespace == "fsdp" and name in REDUCED | GATHERED:
            kind = "gradients" if name in REDUCED else "all-gathered"
            for tensor in tensors([arguments, [*(options or {}).values()]]):
                self.memory.name(tensor, kind)
        return result

    def _collective(self, name: str, operator: Any, arguments: list[Any], result: Any) -> None:
        if not any(frame.f_code.co_name in ONCE for frame in frames()):
            self.traffic.note(operator, arguments, result)
        if name == "_reduce_scatter_base_":
            for tensor in tensors(arguments):
                self.memory.name(tensor, "gradients")

    def _look_at(self, tensor: Tensor) -> None:
        """Add a tensor's storage to the log if it is new memory."""
        if tensor.device.type == "meta" or self.memory.knows(tensor):
            return
        kind = ""
        for frame in frames():
            file, function = frame.f_code.co_filename, frame.f_code.co_name
            if file.endswith("distributed/tensor/_sharding_prop.py"):
                return  # DTensor computes only the shape of a result
            if file.endswith("model/loss.py"):
                kind = kind or self._of_the_loss(tensor)
            if "_fully_shard/" in file:
                kind = kind or BY_FSDP2.get(function, "")
            if "distributed/pipelining/" in file and function in ROOM:
                kind = "pipeline buffers"
        self.memory.hold(tensor, kind)

    def _of_the_loss(self, tensor: Tensor) -> str:
        if tuple(tensor.shape) == self.head:
            return "gradients"
        return "logits" if tensor.dim() == 2 and tensor.shape[-1] == self.head[0] else "activations"


def frames() -> Iterator[FrameType]:
    """The caller's frames, the innermost first."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        yield frame
        frame = frame.f_back


_file = cache(lambda name: Path(name).resolve())
"""The resolved file of a frame. Our files are imported through the links in drover/."""


def place() -> str:
    """The innermost line of ours, outside of this package, as "file:line (function)"."""
    for frame in frames():
        file = _file(frame.f_code.co_filename)
        if HOUSE in file.parents and file.parent != FOLDER and "site-packages" not in file.relative_to(HOUSE).parts:
            return f"{file.relative_to(HOUSE)}:{frame.f_lineno} ({frame.f_code.co_name})"
    return "outside of Drover"


def tensors(value: Any) -> Iterator[Tensor]:
    """All tensors in nested lists and tuples."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for inner in value:
            yield from tensors(inner)
