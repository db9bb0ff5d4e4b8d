"""Messages between ranks from a background thread while training runs. They go through the store in which the ranks
met, over the connection that each rank already has to it.

A second process group (gloo) would open a socket from every rank to every other, for a few messages per save. Beyond
some ten thousand ranks this makes starts fail (Megatron-LM's pull request 1006). Messages to rank 0 go up a tree and
are joined on the way, so no rank holds those of all ranks, and the store keeps none of them.
"""

from __future__ import annotations

import itertools
import time
import zlib
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from drover.pipeline.contract.signed import sign, verified
from drover.pipeline.parallel.messages import decode, encode
from drover.pipeline.parallel.ranks import Ranks

T = TypeVar("T")
ARITY = 8
"""How many ranks report to one rank of the tree: usually those of a node."""
MOST_BYTES = 4 << 20
"""The longest part of a message; torch's store accepts 8 MiB."""
FIRST_LOOK_S, LONGEST_S, SHARE = 0.01, 5.0, 0.1
"""Seconds between two polls for a message: SHARE of the time waited so far, within the other two."""

_numbers = itertools.count()


class HostChannel:
    """Call every method on all ranks alike, in the same order, from one thread.

    Raises:
        DistError: a message did not come within `ranks.patience`, or the store is gone. The channel cannot be used any
            more.
        MessageError: a message in the store is not from a rank of this start.
    """

    def __init__(self, ranks: Ranks) -> None:
        self.ranks, self._done, self._sent = ranks, 0, list[str]()
        if ranks.world > 1:
            self._name = f"drover/hosts{next(_numbers)}"
            self._store: Any = dist.PrefixStore(self._name, _get_default_store())

    def same(self, value: T) -> T:
        """Rank 0's value, on every rank. What values may be: `messages`."""
        if self.ranks.world == 1:
            return value
        self._done += 1
        name = f"{self._done}"
        if not self.ranks.is_rank_zero:
            return self._hear(name, 0)
        self._sent += self._say(name, value)
        return value

    def joined(self, value: T, join: Callable[[Sequence[T]], T]) -> T | None:
        """The values of all ranks joined into one, on rank 0; None elsewhere.

        join: joins the values of neighbouring ranks, in order. It must not raise, because other ranks wait for its
            result.
        """
        if self.ranks.world == 1:
            return join([value])
        self._done += 1
        rank, size = self.ranks.rank, 1
        while size < self.ranks.world:
            if rank % (size * ARITY):
                self._say(f"{self._done}.{rank}", value)
                return None
            others = range(rank + size, min(rank + size * ARITY, self.ranks.world), size)
            heard = [self._hear(f"{self._done}.{other}", other, forget=True) for other in others]
            value, size = join([value, *heard]), size * ARITY
        for key in self._sent:  # earlier values for all ranks: all have read them, or they would not have answered
            self._store.delete_key(key)
        self._sent = []
        return value

    def _say(self, name: str, value: Any) -> list[str]:
        """Leave a value in the store; its keys there."""
        data = zlib.compress(encode(value), 1)
        parts = [data[at:at + MOST_BYTES] for at in range(0, len(data), MOST_BYTES)]
        keys = [name, *(f"{name}+{number}" for number in range(1, len(parts)))]
        try:
            for key, part in zip(keys[1:], parts[1:], strict=True):
                self._set(key, part)
            self._set(name, len(keys).to_bytes(4, "little") + parts[0])  # last: the other ranks wait for this key
        except dist.DistError as error:
            raise type(error)(f"Rank {self.ranks.rank} could not leave a message in the channel of the hosts. Saving "
                              f"checkpoints uses it, and rank 0 has its store: {error}") from error
        return keys

    def _hear(self, name: str, rank: int, *, forget: bool = False) -> Any:
        """The value that a rank has left. forget: delete it, because no other rank reads it."""
        try:
            self._wait(name)
            first = self._get(name)
            count = int.from_bytes(first[:4], "little")
            keys = [name, *(f"{name}+{number}" for number in range(1, count))]
            parts = [first[4:], *map(self._get, keys[1:])]
            for key in keys if forget else ():
                self._store.delete_key(key)
        except dist.DistError as error:
            raise type(error)(f"Rank {self.ranks.rank} waited for rank {rank} in the channel of the hosts, which "
                              f"saving checkpoints uses, without an answer: {error}") from error
        return decode(zlib.decompress(b"".join(parts)), f"rank {rank}")

    def _wait(self, key: str) -> None:
        """Wait for a key by polling. One blocking call would keep this rank's other threads from the store."""
        began, patience_s = time.monotonic(), self.ranks.patience.total_seconds()
        while not self._store.check([key]):
            waited = time.monotonic() - began
            if waited > patience_s:
                raise dist.DistStoreError(f"timeout after {waited:.0f} s")
            time.sleep(min(LONGEST_S, max(FIRST_LOOK_S, SHARE * waited)))

    def _set(self, key: str, content: bytes) -> None:
        self._store.set(key, sign(f"{self._name}/{key}", content))

    def _get(self, key: str) -> bytes:
        return verified(f"{self._name}/{key}", self._store.get(key))
