"""One real rank in a fake process group of any size."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed import distributed_c10d

from drover.pipeline.parallel.ranks import Ranks


@contextmanager
def fake_world(rank: int, world: int) -> Iterator[Ranks]:
    """This process as rank `rank` of `world`, in a process group that transfers nothing. `Ranks.memory` creates fake
    tensors: shapes, types and sizes of storages, without contents."""
    from torch.testing._internal.distributed.fake_pg import FakeStore  # registers the backend

    assert not dist.is_initialized(), "a rehearsal has a process of its own, or comes before a process group"
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    # Real tensors enter as constants: context parallelism, for example, computes its places with NumPy.
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    send = _held(dist.isend)
    try:
        with mock.patch.object(dist, "isend", send), mock.patch.object(distributed_c10d, "isend", send):
            yield Ranks(rank, world, torch.device("cpu"), memory=lambda: mode)
    finally:
        dist.destroy_process_group()


def _held(send: Any) -> Any:
    """`isend` that keeps the sent tensor alive as long as its work object, as other process groups do."""
    def sent(tensor: torch.Tensor, *others: Any, **named: Any) -> Any:
        work = send(tensor, *others, **named)
        weakref.finalize(work, lambda held: None, tensor)
        return work
    return sent
