"""The ranks of a run, how they meet, and what they exchange."""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from drover.model.attention.backend import moved
from drover.model.devices import automatic, find_device
from drover.pipeline.contract.broadcast import Channel, await_ranks, is_local
from drover.pipeline.core.errors import UserError
from drover.pipeline.parallel.host_memory import keep_freed_memory
from drover.pipeline.parallel.messages import decode, encode

PATIENCE = timedelta(minutes=30)
"""The longest legitimate wait: one rank hashing a checkpoint."""
ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
"""The variables by which torch configures its allocator for GPUs."""
MOST_OPEN_FILES_ON_MACOS = 10_240
"""macOS may report an infinite hard limit, but accepts no more than this (OPEN_MAX)."""


class Transfer:
    """Numbers of a device on their way to the host. numbers: they themselves, on the device."""

    def __init__(self, numbers: torch.Tensor) -> None:
        self.numbers = numbers
        self._copy = numbers.to("cpu", non_blocking=True)  # from a GPU into pinned memory
        self._copied = torch.cuda.Event() if numbers.is_cuda else None
        if self._copied is not None:
            self._copied.record()

    def read(self) -> list[float]:
        """The numbers. Waits until the device has computed them, and for nothing that was queued later."""
        if self._copied is not None:
            self._copied.synchronize()
        result: list[float] = self._copy.tolist()
        return result


@dataclass(frozen=True)
class Ranks:
    """This process among all: its number, how many there are, and its device.

    patience: how long a collective waits for other ranks before torch ends the process and names the group.
    memory: the context in which weights are allocated; in a rehearsal it allocates nothing
    (pipeline/rehearsal/step.py).
    """

    rank: int
    world: int
    device: torch.device
    patience: timedelta = PATIENCE
    memory: Callable[[], AbstractContextManager[object]] = nullcontext

    @property
    def is_rank_zero(self) -> bool:
        """Whether this is rank 0, which writes files and prints for all."""
        return self.rank == 0

    @property
    def device_name(self) -> str | None:
        """The GPU's name; None on a CPU."""
        return torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else None

    def sum(self, *values: float) -> list[float]:
        """Sums over all ranks, in float64."""
        return self.sums(*values).read()

    def sums(self, *values: float) -> Transfer:
        """`sum`, without waiting for it."""
        total = moved(torch.tensor(values, dtype=torch.float64), self.device)
        dist.all_reduce(total)
        return Transfer(total)

    def gather(self, value: Any) -> list[Any]:
        """A value of every rank, in rank order, on every rank. What values may be: `messages`."""
        return gathered(value, self.device) if dist.is_initialized() else [value]

    def collect(self, value: Any) -> list[Any]:
        """A value of every rank, in rank order, on rank 0; an empty list elsewhere."""
        return gathered(value, self.device, everywhere=False)

    def barrier(self) -> None:
        """Wait for all ranks."""
        dist.barrier()

    def same(self, value: Any) -> Any:
        """Rank 0's value, on every rank."""
        mine = encode(value) if self.is_rank_zero else b""
        length = torch.tensor([len(mine)], device=self.device)
        dist.broadcast(length, src=0)
        received = _tensor(mine, self.device) if self.is_rank_zero else length.new_empty(int(length), dtype=torch.uint8)
        dist.broadcast(received, src=0)
        return value if self.is_rank_zero else decode(_bytes(received), "rank 0")

    def by_leader(self, function: Callable[[], Any]) -> Any:
        """Call `function` on rank 0 and return its result on every rank.

        A UserError or OSError on rank 0 is raised on every rank.
        """
        value = None
        if self.is_rank_zero:
            try:
                value = function()
            except (UserError, OSError) as error:
                value = error
        received = self.same(value)
        if isinstance(received, Exception):
            raise received
        return received

    def by_all(self, function: Callable[[], object]) -> None:
        """Call `function` on every rank. A UserError on one rank is raised on every rank."""
        problem = None
        try:
            function()
        except UserError as error:
            problem = error
        if failure := next(filter(None, self.gather(problem)), None):
            raise failure


ALONE = Ranks(0, 1, torch.device("cpu"))
"""A process without a process group: all that it gathers is its own."""


def gathered(value: Any, device: torch.device, group: Any = None, *, everywhere: bool = True) -> list[Any]:
    """A value of every rank of a group (None: of all), in rank order. Without `everywhere`, on rank 0 only, and an
    empty list elsewhere. device: that of the group's tensors."""
    mine, rank = encode(value), dist.get_rank(group)
    lengths = torch.empty((dist.get_world_size(group), 1), dtype=torch.int64, device=device)
    dist.all_gather([*lengths], torch.tensor([len(mine)], device=device), group=group)
    sizes = lengths.view(-1).tolist()
    received = _tensor(mine.ljust(max(sizes), b"\0"), device)
    heard = received.new_empty((len(sizes) if everywhere or rank == 0 else 0, len(received)))
    if everywhere:
        dist.all_gather([*heard], received, group=group)
    else:
        dist.gather(received, [*heard] if rank == 0 else None, dst=0)
    parts = zip(heard.cpu(), sizes, strict=False)
    return [decode(_bytes(part[:size]), f"rank {number}") for number, (part, size) in enumerate(parts)]


def _tensor(content: bytes, device: torch.device) -> torch.Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8).to(device)


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.cpu().numpy().tobytes()


def allow_open_files() -> None:
    """Raise the soft limit of open files to the hard one, so that a thousand token shards can stay open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_OPEN_FILES_ON_MACOS if hard == resource.RLIM_INFINITY else hard
    if soft not in (wanted, resource.RLIM_INFINITY):
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def extend_segments() -> None:
    """Let torch extend its segments of a GPU's memory instead of adding new ones. Free memory is then contiguous, and
    tensors of changing sizes fit. torch reads the variable when it first allocates memory on a GPU.

    If the environment already configures the allocator, nothing is changed.
    """
    if not any(name in os.environ for name in ALLOCATOR):
        os.environ[ALLOCATOR[0]] = "expandable_segments:True"


def start_ranks(patience: timedelta = PATIENCE, store: dist.Store | None = None, device: str = "auto") -> Ranks:
    """Join the process group: nccl on GPUs, gloo elsewhere. A process that was started alone is a group of one.

    patience: see `Ranks`. store: the store in which the ranks have met already; None: the environment names the
    address. device: launch.device.

    Raises:
        UserError: this rank has no such device.
    """
    allow_open_files()
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    kind, backend, group_device = automatic() if device == "auto" else device, "gloo", None
    if kind == "cuda":
        local = int(os.environ.get("LOCAL_RANK", "0"))
        if local >= torch.cuda.device_count():
            raise UserError(f"This node has {torch.cuda.device_count()} GPUs, but rank {rank} is local rank {local}. "
                            f"Start at most one rank per GPU.")
        own = group_device = torch.device("cuda", local)
        backend = "nccl"
        extend_segments()
        torch.cuda.set_device(own)
    else:
        try:
            own = find_device(kind)
        except ValueError as error:
            raise UserError(f"launch.device {error}") from None
        keep_freed_memory()
    if world == 1 or is_local(os.environ.get("MASTER_ADDR", "")):  # gloo would listen on the network of the host's name
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    if store is None and (channel := Channel.of_process()) is not None:
        store = channel.connected()
    if store is not None:
        await_ranks(store, rank, world, patience)
        store = dist.PrefixStore("default_pg", store)
        store.set_timeout(patience)
    else:  # no other rank needs an address to meet
        store, rank, world = dist.HashStore(), 0, 1
    try:
        dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=patience,
                                device_id=group_device)
    except RuntimeError as error:
        # NCCL compares hosts and PCI addresses.
        twice = next((line for line in str(error).splitlines() if "Duplicate GPU detected" in line), None)
        if twice is None:
            raise
        raise UserError(f"Two ranks have one GPU ({twice}). Each needs its own: look at what gives GPUs to tasks "
                        f"(CUDA_VISIBLE_DEVICES; on Slurm gpu-bind, gpus-per-task, the site's TaskProlog).") from None
    return Ranks(rank, world, own, patience=patience)


def stop_ranks() -> None:
    """Leave the process group."""
    if dist.is_initialized():
        dist.destroy_process_group()
