"""What ranks on this machine have open for the messages of a save, and how long these take: by the hosts' channel, and
by the group of gloo's beside NCCL's that it took the place of. Ranks are processes without a model."""

from __future__ import annotations

import multiprocessing
import os
import time
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from pipeline.parallel.host_channel import HostChannel
from pipeline.parallel.ranks import Ranks

PATIENCE = timedelta(minutes=5)
SAVES = 5


def measure(ranks: int) -> str:
    """A line of figures."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tools.at_scale.channel"])
    store: Any = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    mine, theirs = context.Pipe()
    processes = [context.Process(target=_rank, args=(rank, ranks, store.port, theirs)) for rank in range(ranks)]
    for process in processes:
        process.start()
    while not mine.poll(1):
        if any(process.exitcode for process in processes):
            for process in processes:
                process.terminate()
            raise SystemExit("A rank's process ended, for the reason above.")
    lines: str = mine.recv()
    for process in processes:
        process.join()
    return lines


def _rank(rank: int, world: int, port: int, pipe: Connection) -> None:
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, world_size=world, is_master=False, timeout=PATIENCE)
    told, kept = [], []
    for name, make in (("gloo group", _by_gloo), ("hosts' channel", _by_channel)):
        before, began = _sockets(), time.perf_counter()
        kept.append(save := make(store, rank, world))
        made_s, began = time.perf_counter() - began, time.perf_counter()
        for number in range(SAVES):
            save(number)
        told.append((name, _sockets() - before, made_s, (time.perf_counter() - began) / SAVES))
    ranks = Ranks(rank, world, torch.device("cpu"), PATIENCE)
    everyone = HostChannel(ranks, store).joined([told], lambda lists: [one for part in lists for one in part])
    if everyone is not None:
        pipe.send("\n".join(
            f"{world} ranks, {name}: {max(one[number][1] for one in everyone)} sockets a rank, made in "
            f"{max(one[number][2] for one in everyone):.2f} s, the messages of a save in "
            f"{1000 * max(one[number][3] for one in everyone):.0f} ms" for number, (name, *_) in enumerate(told)))
    os._exit(0)  # gloo's threads wait for each other at the end


def _sockets() -> int:
    found = (path.readlink() for path in Path("/proc/self/fd").iterdir() if path.is_symlink())
    return sum(str(name).startswith("socket:") for name in found)


def _by_channel(store: Any, rank: int, world: int) -> Any:
    channel = HostChannel(Ranks(rank, world, torch.device("cpu"), PATIENCE), store)

    def save(number: int) -> None:
        channel.same(None)
        channel.joined([rank], lambda lists: [one for part in lists for one in part])
        channel.same(None)
    return save


def _by_gloo(store: Any, rank: int, world: int) -> Any:
    group: Any = dist.ProcessGroupGloo(dist.PrefixStore("gloo", store), rank, world, PATIENCE)

    def everywhere() -> None:
        """Sizes, then contents."""
        group.allgather([[torch.zeros(1) for _ in range(world)]], [torch.zeros(1)]).wait()
        group.allgather([[torch.zeros(64) for _ in range(world)]], [torch.zeros(64)]).wait()

    def save(number: int) -> None:
        for _ in range(3):
            everywhere()
        group.gather([[torch.zeros(64) for _ in range(world)]] if rank == 0 else [], [torch.zeros(64)]).wait()
        group.broadcast([torch.zeros(64)]).wait()
    return save
